"""A network taken apart: what each parameter tensor sees of some rows, from which their gradients can be formed.

Rows pass through a copy of the network in float64. Of a layer's weight they keep what went in and what came back
(`factors`), where that is less than the gradient; of biases, of normalisations, and of all that is not the weight of a
layer, the gradients themselves.
"""

from __future__ import annotations

from collections import defaultdict
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fullcp.features.factors import Factors, Part, Whole
from fullcp.features.jacobian import Jacobian
from fullcp.features.layers import Use, is_usual, layers_of, uses
from fullcp.features.network import Network, normal
from fullcp.features.outputs import as_rows
from fullcp.features.preserve import parameters_by_name, preserved
from fullcp.inputs import check_all_finite
from fullcp.memory import rows_within

Block = dict[str, Part]  # by the name of the parameter tensor

_AGREEMENT = 1e-9  # of a tensor's largest gradient: float32 anywhere in the network shows
_SAME_OUTPUTS = 5e-2  # relative: up to the precision of the network itself, which may be half
_MOST_ROWS = 1024
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


class NotSeparableError(Exception):
    """The network cannot be taken apart in float64."""


class Dissection:
    """What rows keep of a network, so that their gradients can be formed; all float64.

    A few rows show which tensors get the gradients of plain autograd that way; the others (weights that a module uses
    in a way of its own) keep gradients of theirs, by `Jacobian`. Weights in several places, and layers used several
    times, have the positions of all uses.

    Parameters
    ----------
    jacobian : the network; its parameters are those that count.
    x : Tensor (n, ...)
        A few rows.

    Attributes
    ----------
    bytes_per_row : what one row keeps.
    """

    def __init__(self, jacobian: Jacobian, x: Tensor):
        self.jacobian = jacobian
        self._rest: list[str] = []  # tensors whose gradients come from elsewhere
        self._facts: dict[str, Any] = {}  # how
        self._whole: set[str] = set()  # weights whose gradient is smaller than its factors
        self._layout: dict[str, int] | None = None
        self._copy = self._in_double()
        self._find()
        try:
            self._settle(x)
        except Exception as error:
            raise NotSeparableError(str(error)) from error

    def __getstate__(self) -> dict[str, Any]:
        """For pickles and copies: without the copy of the network."""
        return {name: value for name, value in vars(self).items() if name not in ("_copy", "_watched", "_others")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._copy = self._in_double()
        self._find()

    def rows_within(self, budget: int) -> int:
        """How many rows can pass through at a time within `budget` bytes."""
        return rows_within(budget, self._bytes_of_pass, at_most=_MOST_ROWS)

    def __call__(self, x: Tensor, start: int | None = None) -> Block:
        """What the rows x (n, ...) keep; they are those from `start` on, for messages."""
        x = _double(normal(x))
        with preserved(self._copy):
            f, found = uses(self._copy, list(self._watched), x)
        check_all_finite(start, {"outputs": f})
        gradients: dict[str, list[Tensor]] = defaultdict(list)  # (n, O, d) of each use
        factors: dict[str, list[Factors]] = defaultdict(list)
        for use in found:
            self._take(use, len(x), gradients, factors)
        block: Block = {name: Whole(torch.stack(each).sum(0)) for name, each in gradients.items()}
        for name, several in factors.items():
            part = Factors.merged(several)
            block[name] = part.whole() if name in self._whole else part
        if self._rest:
            sizes = [self.jacobian.parameters[name].numel() for name in self._rest]
            phi = torch.split(self._others(x)[1], sizes, 2)
            block |= {name: Whole(P) for name, P in zip(self._rest, phi, strict=True)}
        self._check(block, start)
        return block

    def _take(self, use: Use, n: int, gradients: dict[str, list[Tensor]], factors: dict[str, list[Factors]]) -> None:
        """Add one use of a layer or a normalisation by n rows; one that does not see row by row is left out."""
        module, (weight, bias) = use.module, self._watched[use.module]
        if use.x.shape[0] % n != 0 or use.x.ndim < (4 if isinstance(module, nn.Conv2d) else 2):
            return
        if not is_usual(use):
            return
        if not isinstance(module, (nn.Linear, nn.Conv2d)):
            if weight:
                gradients[weight].append(_by_channel(module, use.g * _normalised(module, use.x), n))
            if bias:
                gradients[bias].append(_by_channel(module, use.g, n))
            return
        O, p = len(use.g), len(module.weight)
        if isinstance(module, nn.Linear):
            x = use.x.reshape(n, -1, module.in_features)  # (n, T, q)
            g = use.g.reshape(O, n, -1, p).permute(1, 0, 3, 2)  # (n, O, p, T)
        else:
            x = use.x.reshape(n, -1, *use.x.shape[1:])  # (n, images, channels, height, width)
            g = use.g.reshape(O, n, x.shape[1], p, -1).permute(1, 0, 3, 2, 4).flatten(3)
        if weight:
            factors[weight].append(Factors((module,), (x,), g))
        if bias:
            gradients[bias].append(g.sum(3))

    def _in_double(self) -> nn.Module:
        try:
            with self.jacobian.borrowed() as model:
                return deepcopy(model).double()
        except Exception as error:
            raise NotSeparableError(str(error)) from error

    def _find(self) -> None:
        """The layers and normalisations to watch, with the names of the weights and biases that they account for."""
        counts = set(self.jacobian.parameters).difference(self._rest)
        names = {id(p): name for name, p in parameters_by_name(self._copy).items() if name in counts}
        modules = [*layers_of(self._copy), *(m for m in self._copy.modules() if type(m) in _NORMS)]
        owned = {m: (names.get(id(m.weight)), names.get(id(getattr(m, "bias", None)))) for m in modules}
        self._watched = {module: pair for module, pair in owned.items() if any(pair)}
        if self._rest:
            self._others = Jacobian(self._copy, facts=self._facts)

    def _settle(self, x: Tensor) -> None:
        """Find out which tensors get their gradients right, which are smaller whole, and what a row takes."""
        own = self.jacobian.predict(x).double()
        x = _double(normal(x))
        block = self(x)
        wrong, f = self._compare(block, x)
        if (f - own).abs().amax() > _SAME_OUTPUTS * own.abs().amax():
            raise NotSeparableError("the network is another one in float64")
        if wrong:
            self._facts = Jacobian(self._copy, x, only=wrong).facts()
            self._rest = self._facts["trainable"]
            self._find()
        self._whole = {name for name, part in block.items() if part.whole().bytes <= part.bytes}
        block = self(x)
        self._layout = _layout(block)
        self.bytes_per_row = sum(part.bytes for part in block.values()) // len(x)
        width = torch.finfo(self.jacobian.dtype).bits // 8
        with preserved(self._copy):
            seen = sum(use.x.numel() + 2 * use.g.numel() for use in uses(self._copy, list(self._watched), x)[1])
        others = self._others.bytes_per_row() if self._rest else 0
        self._bytes_of_pass = 8 * Network.bytes_per_row(self.jacobian) // width + 8 * seen // len(x) + others

    def _compare(self, block: Block, x: Tensor) -> tuple[list[str], Tensor]:
        """The tensors whose gradients are not those of plain autograd, one row and output at a time; the outputs."""
        named = {name: p for name, p in parameters_by_name(self._copy).items() if name in self.jacobian.parameters}
        off, size = dict.fromkeys(named, 0.0), dict.fromkeys(named, 0.0)
        outputs = []
        with preserved(self._copy, list(named)):
            for i in range(len(x)):
                f = as_rows(self._copy(x[i : i + 1]), 1)
                outputs.append(f.detach())
                for o, fo in enumerate(f[0]):
                    truth = torch.autograd.grad(fo, list(named.values()), retain_graph=True, materialize_grads=True)
                    for name, expected in zip(named, truth, strict=True):
                        expected = expected.flatten()
                        found = block[name][i : i + 1].whole().rows[0, o] if name in block else 0 * expected
                        off[name] = max(off[name], float((found - expected).abs().amax()))
                        size[name] = max(size[name], float(expected.abs().amax()))
        floor = 100 * torch.finfo(torch.float64).eps * max(size.values())
        return [name for name in named if not off[name] <= _AGREEMENT * size[name] + floor], torch.cat(outputs)

    def _check(self, block: Block, start: int | None) -> None:
        """Refuse gradients that are not finite, and rows for which the network runs other layers."""
        for part in block.values():
            check_all_finite(start, {"gradients": part.g if isinstance(part, Factors) else part.rows})
        if self._layout is not None and _layout(block) != self._layout:
            where = "of X" if start is None else f"from row {start} of X on"
            raise ValueError(
                f"model runs other layers for rows {where} than for those it was probed with, which exact curvature "
                "can follow only where the gradients of all rows fit: raise memory, or use curvature='diagonal'"
            )


def _layout(block: Block) -> dict[str, int]:
    return {name: part.positions if isinstance(part, Factors) else 0 for name, part in block.items()}


def _double(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


def _normalised(module: nn.Module, x: Tensor) -> Tensor:
    """What a normalisation multiplies its weight with."""
    plain = {name: torch.full_like(p, float(name == "weight")) for name, p in module.named_parameters(recurse=False)}
    with torch.no_grad():
        return functional_call(module, plain, (x,))


def _by_channel(module: Any, values: Tensor, n: int) -> Tensor:
    """The sums of values (O, n k, ...) over all but rows, outputs and the entries of the weight: (n, O, d)."""
    d = module.weight.numel()
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        sums = values.reshape(len(values), n, -1, d).sum(2)
    else:
        sums = values.reshape(len(values), n, values.shape[1] // n, d, -1).sum((2, 4))
    return sums.transpose(0, 1)
