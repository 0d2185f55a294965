"""Kronecker-factored curvature (KFAC): a block a parameter tensor, for nn.Linear and nn.Conv2d layers.

With a the inputs of a layer and g the gradients of the outputs in what the layer gives, at T positions a row (one for a
dense layer, the pixels of a convolution: the "expand" setting of Eschenhagen et al., 2023),

    weight block   B (x) A,   A = sum_{i,t} a a^T,   B = 1/(N T) sum_{i,t,o} g g^T
    bias block     sum_{i,o} (sum_t g) (sum_t g)^T, which is exact

in sum scale, from exact back-propagation of all O outputs. l2 is added to the products of eigenvalues (Immer et al.,
2021), so that nothing is damped. Trainable tensors outside of such layers (normalisation, parameters of a module's own)
get their exact block where they are small.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fullcp.curvature.eigen import Block, EigenCurvature, expand_over, restore_blocks
from fullcp.features import FeatureRows, Jacobian, Network
from fullcp.features.layers import Layer, Signal, has_own_forward, layers_of, signals
from fullcp.inputs import check_all_finite
from fullcp.memory import check_held, rows_within
from fullcp.progress import track

NAME = "kfac"
_PROBE_ROWS = 4
_MOST_ROWS = 4096
_AGREEMENT = 1e-3  # relative to the largest entry: the signals in the network's precision against the gradients
_AGREEMENT_HALF = 5e-2
_LARGEST_EXACT = 2000  # entries of a tensor whose block is held whole
_COPIES = 3  # of the largest factor, while it is decomposed
_DECOMPOSITION = 10  # multiply-adds of eigenvalues and vectors of a d x d matrix, in units of d^3
_OTHERS = "use curvature='full', 'low_rank', 'last_layer' or 'diagonal'"


def fit_kfac(features: FeatureRows, l2: object, *, cross: bool = True) -> EigenCurvature:
    """The KFAC approximation of H over the rows of `features`; see `fullcp.curvature.fit_curvature`.

    `l2` must be one number, or one value a parameter tensor.
    """
    diagonal = expand_over(features, l2)
    if cross:
        features.hold()
    return KfacCurvature(features, features.kept.pop(NAME, None) or kfac_blocks(features), diagonal, name=NAME)


def restore_kfac(features: FeatureRows, state: dict[str, Tensor]) -> KfacCurvature:
    """The structure whose `state()` was saved, over the same rows."""
    return KfacCurvature(features, restore_blocks(features, state), state["l2"], name=NAME)


class KfacCurvature(EigenCurvature):
    """The KFAC approximation, which knows the leverages of rows from what their layers see."""

    # H is near enough: after four, the size of the step is what it is after twenty to some ten per cent.
    rough_steps = 4

    def slack(self) -> Tensor:
        """I - V_i, (N, O, O): not positive where the approximation is poor.

        With u = U_B^T g and v = U_A^T a a dense layer adds sum_pq u_p^2 v_q^2 / (lambda_pq + l2): no phi, and no
        product of two matrices a row.
        """
        features, O = self.features, self.features.outputs
        slack = torch.eye(O, dtype=torch.float64, device=self.root.device).repeat(features.count, 1, 1)
        layers, bytes_per_row = _layers_with_factors(features)
        blocks = dict(zip(features.jacobian.parameters, self.blocks, strict=True))
        roots = dict(zip(blocks, torch.split(self.root, self.sizes), strict=True))
        for rows, found in _chunks_of_signals(features, layers, bytes_per_row, "leverages"):
            for signal in found:
                weight, bias = layers[signal.module].weight, layers[signal.module].bias
                if weight is not None:
                    slack[rows] -= _leverage_of_weight(signal, blocks[weight], roots[weight])
                if bias is not None:
                    slack[rows] -= _gram(roots[bias] * blocks[bias].rotate(signal.in_bias().double()))
        names = _without_layer(features, layers)
        for rows, phi in _only(features, names).chunks("leverages") if names else ():
            parts = torch.split(phi.double(), [blocks[name].eigenvalues.numel() for name in names], 2)
            for name, part in zip(names, parts, strict=True):
                slack[rows] -= _gram(roots[name] * blocks[name].rotate(part))
        return slack


def _leverage_of_weight(signal: Signal, block: Block, root: Tensor) -> Tensor:
    """What a layer's weight adds to V of some rows, (n, O, O)."""
    assert block.left is not None
    assert block.right is not None
    if signal.a.shape[1] > 1:
        return _gram(root * block.rotate(signal.in_weight().double()))
    u, v = signal.g[:, :, 0].double() @ block.left, signal.a[:, 0].double() @ block.right  # (O, n, p), (n, q)
    return torch.einsum("onp,mnp,np->nom", u, u, v.square() @ root.square().view_as(block.eigenvalues).T)


def _gram(rows: Tensor) -> Tensor:
    return rows @ rows.mT


@dataclass(frozen=True)
class KfacCost:
    """What a fit takes.

    Attributes
    ----------
    bytes : of all factors, and of the decomposition of the largest.
    largest : d, that of the largest factor d x d.
    operations : multiply-adds of the factors and of their decompositions.
    """

    bytes: int
    largest: int
    operations: float


def kfac_cost(features: FeatureRows) -> KfacCost:
    """What a fit would cost; a ValueError where it would raise one."""
    layers, _ = _layers_with_factors(features)
    return _cost(features, layers)


def _cost(features: FeatureRows, layers: dict[Layer, _Factors]) -> KfacCost:
    rest = _without_layer(features, layers)
    _check_sizes(features, rest)
    parameters, rows = features.jacobian.parameters, features.count * features.outputs
    sums = [(parameters[name].numel(), rows) for name in rest]  # the size of each factor, and of how many rows it is
    for layer, factors in layers.items():
        p, q = len(layer.weight), layer.weight[0].numel()
        if factors.weight is not None:
            positions = factors.positions_a_row
            sums += [(q, features.count * positions), (p, rows * positions)]
        if factors.bias is not None:
            sums.append((p, rows))
    largest = max(d for d, _ in sums)
    return KfacCost(
        bytes=8 * (sum(d**2 for d, _ in sums) + _COPIES * largest**2),
        largest=largest,
        operations=sum(count * d**2 + _DECOMPOSITION * float(d) ** 3 for d, count in sums),
    )


def kfac_blocks(features: FeatureRows) -> list[Block]:
    """The blocks of S, decomposed, in the order of the parameters; no gradients of whole rows are formed."""
    layers, bytes_per_row = _layers_with_factors(features)
    cost = _cost(features, layers)
    check_held(
        cost.bytes,
        features.x.device,
        by="curvature='kfac'",
        what=f"factors of up to {cost.largest} x {cost.largest} numbers",
        advice="curvature='low_rank', 'last_layer' and 'diagonal' take less, and so do fewer parameters (see "
        "`parameters`)",
    )
    for _, found in _chunks_of_signals(features, layers, bytes_per_row, "curvature"):
        for signal in found:
            layers[signal.module].add(signal)
    blocks: dict[str, Block] = {}
    for factors in layers.values():
        blocks |= factors.blocks()
    blocks |= _exact_blocks(features, _without_layer(features, layers))
    return [blocks[name] for name in features.jacobian.parameters]


def _chunks_of_signals(
    features: FeatureRows, layers: dict[Layer, _Factors], bytes_per_row: int, description: str
) -> Iterator[tuple[slice, list[Signal]]]:
    """The signals of chunks of rows, with their places."""
    size = rows_within(features.memory // 8, bytes_per_row, at_most=_MOST_ROWS)
    starts = range(0, features.count, size)
    for start in track(starts, description, len(starts)):
        rows = slice(start, min(start + size, features.count))
        with features.jacobian.borrowed() as model:
            found = signals(model, list(layers), features.x[rows])
        for signal in found:
            check_all_finite(start, {"activations": signal.a, "gradients": signal.g.transpose(0, 1)})
        yield rows, found


@dataclass
class _Factors:
    """Sums over the rows of one layer; names of parameters that do not count are None.

    Attributes
    ----------
    positions_a_row : T.
    A : of a a^T at each position.
    B : of g g^T at each position.
    G : of g g^T, g summed over positions.
    positions : N T.
    """

    weight: str | None
    bias: str | None
    positions_a_row: int
    A: Tensor | None = None
    B: Tensor | None = None
    G: Tensor | None = None
    positions: int = 0

    def add(self, signal: Signal) -> None:
        """Add some rows."""
        a, g = signal.a.flatten(0, 1).double(), signal.g.double()
        if self.weight is not None:
            self.A, self.B = _plus(self.A, a), _plus(self.B, g.flatten(0, 2))
            self.positions += len(a)
        if self.bias is not None:
            self.G = _plus(self.G, g.sum(2).flatten(0, 1))

    def blocks(self) -> dict[str, Block]:
        """The finished blocks, by the names of the parameters; the sums are let go."""
        found = {}
        if self.weight is not None:
            assert self.A is not None
            assert self.B is not None
            found[self.weight] = Block.kronecker(self.B.div_(self.positions), self.A)
        if self.bias is not None:
            assert self.G is not None
            found[self.bias] = Block.of(self.G)
        self.A = self.B = self.G = None
        return found


def _plus(total: Tensor | None, rows: Tensor) -> Tensor:
    """The total with rows^T rows added; None is zero."""
    return rows.T @ rows if total is None else total.addmm_(rows.T, rows)


def _layers_with_factors(features: FeatureRows) -> tuple[dict[Layer, _Factors], int]:
    """The layers whose signals give their gradients, as a few rows confirm, and the bytes that a row's signals take."""
    jacobian, probe = features.jacobian, features.sample(_PROBE_ROWS)
    names = {id(p): name for name, p in jacobian.parameters.items()}
    sizes = [p.numel() for p in jacobian.parameters.values()]
    phi = dict(zip(names.values(), torch.split(jacobian(probe)[1], sizes, 2), strict=True))
    owners = Counter(id(p) for module in jacobian.model.modules() for p in module.parameters(recurse=False))
    with jacobian.borrowed() as model:
        calls = signals(model, layers_of(model), probe)
    uses = Counter(call.module for call in calls)
    layers: dict[Layer, _Factors] = {}
    for call in calls:
        weight, bias = call.module.weight, call.module.bias
        explained: dict[int, str] = {}
        for p, gradient in ((weight, call.in_weight()), (bias, call.in_bias())):
            name = names.get(id(p))
            if name is None:
                continue
            if owners[id(p)] > 1 or uses[call.module] > 1:
                raise ValueError(
                    f"{name} is used in more than one place of the network, where curvature='kfac' has no factors for "
                    f"it: {_OTHERS}"
                )
            if _agree(gradient, phi[name], call):
                explained[id(p)] = name
            elif not has_own_forward(call.module):
                raise ValueError(
                    f"gradients of {name} are not those that its layer explains (the network uses it past the layer, "
                    f"or mixes rows), so that curvature='kfac' has no factors for it: {_OTHERS}"
                )
        layers[call.module] = _Factors(explained.get(id(weight)), explained.get(id(bias)), call.a.shape[1])
    width = torch.finfo(jacobian.dtype).bits // 8 + 8  # as they come, and in float64
    parts = sum(call.a.numel() + 2 * call.g.numel() for call in calls)
    return layers, Network.bytes_per_row(jacobian) + width * parts // len(probe)


def _agree(found: Tensor, expected: Tensor, signal: Signal) -> bool:
    """Whether the gradients of a signal are those expected, to the least precision on the way."""
    if found.shape != expected.shape:
        return False
    bits = min(torch.finfo(t.dtype).bits for t in (expected, signal.a, signal.g))
    share = _AGREEMENT if bits > 16 else _AGREEMENT_HALF
    return bool((found - expected).abs().amax() <= share * expected.abs().amax())


def _exact_blocks(features: FeatureRows, names: list[str]) -> dict[str, Block]:
    """The blocks of S of tensors that no layer accounts for, held whole."""
    parameters = features.jacobian.parameters
    _check_sizes(features, names)
    if not names:
        return {}
    sizes = [parameters[name].numel() for name in names]
    sums = [torch.zeros(d, d, dtype=torch.float64, device=features.x.device) for d in sizes]
    for _, phi in _only(features, names).chunks("curvature"):
        for S, P in zip(sums, torch.split(phi.flatten(0, 1).double(), sizes, 1), strict=True):
            S.addmm_(P.T, P)
    return {name: Block.of(S) for name, S in zip(names, sums, strict=True)}


def _without_layer(features: FeatureRows, layers: dict[Layer, _Factors]) -> list[str]:
    """The parameters that no layer accounts for."""
    covered = {name for factors in layers.values() for name in (factors.weight, factors.bias)}
    return [name for name in features.jacobian.parameters if name not in covered]


def _only(features: FeatureRows, names: list[str]) -> FeatureRows:
    """The gradients of the same rows in some of the parameters."""
    return FeatureRows(Jacobian(features.jacobian.model, features.x, only=names), features.x, memory=features.memory)


def _check_sizes(features: FeatureRows, names: list[str]) -> None:
    """Refuse tensors that no layer accounts for, where they are too large for exact blocks."""
    parameters = features.jacobian.parameters
    for name in names:
        if parameters[name].numel() > _LARGEST_EXACT:
            raise ValueError(
                f"{name} belongs to {_owner(features.jacobian.model, parameters[name])}, which curvature='kfac' has no "
                "factors for (it has them for nn.Linear and ungrouped nn.Conv2d), and with "
                f"{parameters[name].numel()} entries it is too large for an exact block of its own (up to "
                f"{_LARGEST_EXACT}): {_OTHERS}, or take its requires_grad away"
            )


def _owner(model: nn.Module, parameter: nn.Parameter) -> str:
    """The kind of module that holds a parameter, in words."""
    owner = next(m for m in model.modules() if any(p is parameter for p in m.parameters(recurse=False)))
    if isinstance(owner, nn.Conv2d) and owner.groups > 1:
        return f"a {type(owner).__name__} of {owner.groups} groups"
    if isinstance(owner, (nn.Linear, nn.Conv2d)):
        return f"a {type(owner).__name__} that uses it in a way of its own"
    return f"a module of type {type(owner).__name__}"
