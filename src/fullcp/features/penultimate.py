"""z: what goes into the last layer of a network, which is all of phi where only that layer's parameters count."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn

from fullcp.features.jacobian import Jacobian
from fullcp.features.layers import recording
from fullcp.features.network import normal
from fullcp.features.outputs import as_rows
from fullcp.features.preserve import parameters_by_name, preserved, unwrap
from fullcp.sources import Inputs

_PROBE_ROWS = 2
# Gradients of the last layer against [z, 1], relative to the largest: in the network's precision, whatever that is.
_AGREEMENT = 1e-3
_AGREEMENT_HALF = 5e-2


def last_layer_parameters(model: nn.Module, x: Inputs) -> list[str]:
    """The names of the trainable parameters of the nn.Linear layer whose output is the network's own."""
    model = unwrap(model)
    names = {id(p): name for name, p in parameters_by_name(model).items() if p.requires_grad}
    with preserved(model), torch.no_grad(), recording(_linear_layers(model)) as calls:
        probe = normal(x[:_PROBE_ROWS])
        f = as_rows(model(probe), len(probe))
    found = [module for module, _, output in calls if _same_numbers(output, f)][-1:]
    if not found:
        raise ValueError(
            "curvature='last_layer' needs a network that ends in an nn.Linear layer, this one does something to the "
            "output of its last: name the layer, such as parameters='head'; its exact curvature is taken then"
        )
    (layer,) = found
    last = [p for p in layer.parameters() if id(p) in names]  # those of parametrizations too
    if not last:
        raise ValueError("curvature='last_layer' needs parameters of the last layer that have requires_grad")
    owners = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    if any(owners[id(p)] > 1 for p in last) or sum(module is layer for module, _, _ in calls) > 1:
        raise ValueError(
            f"curvature='last_layer' needs a last layer that is used once, {names[id(last[0])]} is used elsewhere too: "
            "use curvature='full'"
        )
    if not _is_linear_in(model, layer, last, x):
        raise ValueError(
            f"curvature='last_layer' needs a last layer that uses its weight as an nn.Linear does, "
            f"{type(layer).__name__} does something of its own with {names[id(last[0])]}: name the layer, such as "
            "parameters='head'; its exact curvature is taken then"
        )
    return [names[id(p)] for p in last]


def is_last_layer(jacobian: Jacobian, x: Inputs) -> bool:
    """Whether the parameters that count are those of one nn.Linear layer that gives the network's outputs."""
    try:
        single = Penultimate(jacobian)
        single(x[:_PROBE_ROWS])
    except ValueError:
        return False
    return _is_linear_in(single.model, single.layer, list(jacobian.parameters.values()), x)


class Penultimate(Jacobian):
    """The gradient of one output in its own parameters of the last layer: [z, 1], (n, 1, p + 1).

    Every output has the same, and none has any other: phi is the Kronecker product of I_O and this. z or 1 is left out
    where the weight or the bias does not count.

    Parameters
    ----------
    jacobian : the gradients in the parameters of the last layer alone.
    """

    def __init__(self, jacobian: Jacobian):
        super().__init__(jacobian.model, facts=jacobian.facts())
        self.copies, self.outputs = jacobian.outputs, 1
        owned = {id(p) for p in jacobian.parameters.values()}
        layers = [m for m in _linear_layers(self.model) if any(id(p) in owned for p in m.parameters(recurse=False))]
        if len(layers) != 1 or layers[0].out_features != self.copies:
            raise ValueError("curvature='last_layer' needs gradients in the last layer's parameters alone")
        self.layer = layers[0]
        self.has_weight, self.has_bias = id(self.layer.weight) in owned, id(self.layer.bias) in owned

    @property
    def size(self) -> int:
        """p + 1: the parameters of one output."""
        return super().size // self.copies

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The first output (n, 1), and [z, 1] (n, 1, p + 1)."""
        with self.borrowed(), torch.no_grad(), recording([self.layer]) as calls:
            f = as_rows(self.model(normal(x)), len(x))
        if len(calls) != 1 or not _same_numbers(calls[0][2], f):
            raise ValueError(
                "curvature='last_layer' needs the last layer's output to be the network's for all rows: use "
                "curvature='full'"
            )
        z = calls[0][1].reshape(len(x), -1)
        parts = [z] if self.has_weight else []
        parts += [z.new_ones(len(x), 1)] if self.has_bias else []
        return f[:, :1].detach(), torch.cat(parts, 1).unsqueeze(1)

    def predict(self, x: Tensor) -> Tensor:
        """The first output, (n, 1)."""
        return super().predict(x)[:, :1]

    def part(self, v: Tensor) -> Tensor:
        """Vectors in the last layer's parameters (..., D), parted by output: (..., O, p + 1)."""
        cut = self.copies * self.layer.in_features if self.has_weight else 0
        shape = *v.shape[:-1], self.copies, -1
        parts = [v[..., :cut].reshape(shape)] if self.has_weight else []
        return torch.cat([*parts, v[..., cut:].reshape(shape)] if self.has_bias else parts, -1)

    def join(self, v: Tensor) -> Tensor:
        """The inverse of `part`: (..., O, p + 1) to (..., D)."""
        cut = self.layer.in_features if self.has_weight else 0
        return torch.cat([v[..., :cut].flatten(-2), v[..., cut:].flatten(-2)], -1)

    def locate(self, column: int) -> str:
        """Name the parameter entry of the first output behind a column of [z, 1]."""
        bias = self.has_bias and column == self.size - 1
        return super().locate(super().size - self.copies if bias else column)


def _linear_layers(model: nn.Module) -> list[nn.Linear]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def _is_linear_in(model: nn.Module, layer: nn.Linear, parameters: list[nn.Parameter], x: Inputs) -> bool:
    """Whether the gradients of the outputs in parameters of the last layer are its input z (weight) and 1 (bias).

    A class derived from nn.Linear, and weight normalisation, can have others.
    """
    probe = normal(x[:_PROBE_ROWS])
    names = {id(p): name for name, p in parameters_by_name(model).items()}
    with preserved(model, [names[id(p)] for p in parameters]):
        with recording([layer]) as calls:
            f = as_rows(model(probe), len(probe))
        u = torch.linspace(0.5, 1.5, f.numel(), dtype=f.dtype, device=f.device).view_as(f)  # a sum tells of all outputs
        found = torch.autograd.grad((u * f).sum(), parameters, materialize_grads=True)
    z = calls[0][1].reshape(len(probe), -1)
    bits = min(torch.finfo(t.dtype).bits for t in (z, f, *parameters))
    share = _AGREEMENT if bits > 16 else _AGREEMENT_HALF
    for p, gradient in zip(parameters, found, strict=True):
        if p is not layer.weight and p is not layer.bias:
            return False
        expected = u.double().T @ z.double() if p is layer.weight else u.double().sum(0)
        if gradient.shape != expected.shape or (gradient - expected).abs().amax() > share * expected.abs().amax():
            return False
    return True


def _same_numbers(output: Tensor, f: Tensor) -> bool:
    if output.numel() != f.numel():
        return False
    output = output.reshape(f.shape)
    return bool(((output == f) | (output.isnan() & f.isnan())).all())
