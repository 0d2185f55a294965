"""Three ways to the same numbers: outputs f (n, O) and their gradients phi (n, O, D), row by row.

`LinearGradients` builds them from the activations and back-propagated signals of nn.Linear layers, at the cost of one
backward pass an output. `FunctionalGradients` lets torch.func do it for any module it can vectorise.
`LoopGradients` differentiates one row after the other, and serves what is left (some recurrent networks).
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

from fullcp.features.layers import recording
from fullcp.features.outputs import as_rows
from fullcp.features.preserve import parameters_by_name

Parameters = dict[str, nn.Parameter]


class Gradients(Protocol):
    """A way to compute outputs and per-row gradients."""

    name: str

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs (n, O) and gradients (n, O, D) of the rows x (n, ...)."""


class NotLinearError(Exception):
    """The module is not one that `LinearGradients` understands."""


@dataclass(frozen=True)
class _Layer:
    """A linear layer and the columns of phi that its weight and bias have, where they are trainable."""

    module: nn.Linear
    weight: slice | None
    bias: slice | None


class LinearGradients:
    """Gradients of a module whose trainable parameters all belong to nn.Linear layers.

    For one row, the gradient in a layer's weight is the outer product of the signal that comes back to the layer's
    output and the activation that went in.
    """

    name = "linear layers"

    def __init__(self, model: nn.Module, parameters: Parameters):
        self.model = model
        columns: dict[int, slice] = {}  # id of a parameter -> its columns of phi
        self.size = 0
        for parameter in parameters.values():
            columns[id(parameter)] = slice(self.size, self.size + parameter.numel())
            self.size += parameter.numel()
        self.layers = [
            _Layer(module, columns.get(id(module.weight)), columns.get(id(module.bias)))
            for module in model.modules()
            if type(module) is nn.Linear and any(id(p) in columns for p in module.parameters(recurse=False))
        ]
        owned = {id(p) for layer in self.layers for p in layer.module.parameters(recurse=False)}
        if not owned.issuperset(columns):
            raise NotLinearError("a trainable parameter belongs to no nn.Linear layer")

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs (n, O) and gradients (n, O, D)."""
        with recording([layer.module for layer in self.layers]) as calls:
            f = as_rows(self.model(x), len(x))
        calls = [call for call in calls if call[2].requires_grad]
        if not calls:
            raise NotLinearError("the output does not depend on the trainable parameters")
        if any(a.shape[0] != len(x) or z.shape[0] != len(x) for _, a, z in calls):
            raise NotLinearError("a layer does not see one row an example")
        phi = f.new_zeros(len(x), f.shape[1], self.size)  # (n, O, D)
        of = {id(layer.module): layer for layer in self.layers}
        signals_wanted = [z for _, _, z in calls]
        for o in range(f.shape[1]):
            last = o == f.shape[1] - 1
            signals = torch.autograd.grad(f[:, o].sum(), signals_wanted, retain_graph=not last, allow_unused=True)
            for (module, a, _), g in zip(calls, signals, strict=True):
                if g is not None:
                    self._add_layer(phi[:, o], of[id(module)], a, g)
        return f.detach(), phi

    def _add_layer(self, phi: Tensor, layer: _Layer, a: Tensor, g: Tensor) -> None:
        """Add one use of a layer, input a (n, ..., in) and signal g (n, ..., out), to phi (n, D)."""
        if layer.weight is not None:
            block = phi[:, layer.weight].view(len(phi), layer.module.out_features, layer.module.in_features)
            if a.ndim == 2:
                block.addcmul_(g.unsqueeze(2), a.unsqueeze(1))
            else:
                block.add_(torch.einsum("n...o,n...i->noi", g, a))
        if layer.bias is not None:
            phi[:, layer.bias] += g if g.ndim == 2 else g.flatten(1, -2).sum(1)


class FunctionalGradients:
    """Gradients by torch.func, for every module that vmap can vectorise."""

    name = "torch.func"

    def __init__(self, model: nn.Module, parameters: Parameters):
        self.model = model
        self.names = list(parameters)

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs (n, O) and gradients (n, O, D)."""
        values = {name: p.detach() for name, p in parameters_by_name(self.model).items() if name in self.names}

        def one_row(values: dict[str, Tensor], row: Tensor) -> tuple[Tensor, Tensor]:
            f = as_rows(functional_call(self.model, values, (row.unsqueeze(0),)), 1)[0]
            return f, f

        jacobian = vmap(jacrev(one_row, has_aux=True), in_dims=(None, 0))
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message="There is a performance drop"
            )  # vmap's, about a fallback of its own
            gradients, f = jacobian(values, x)
        return f.detach(), torch.cat([gradients[name].detach().reshape(*f.shape, -1) for name in values], dim=2)


class LoopGradients:
    """Gradients by plain autograd, one row and output at a time: slow, and good for any module."""

    name = "a loop over rows"

    def __init__(self, model: nn.Module, parameters: Parameters):
        self.model = model
        self.names = list(parameters)

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs (n, O) and gradients (n, O, D)."""
        rows = [self._one_row(row) for row in x]
        return torch.stack([f for f, _ in rows]), torch.stack([phi for _, phi in rows])

    def _one_row(self, row: Tensor) -> tuple[Tensor, Tensor]:
        f = as_rows(self.model(row.unsqueeze(0)), 1)[0]
        found = parameters_by_name(self.model)
        parameters = [found[name] for name in self.names]
        phi = [
            torch.cat(
                [g.flatten() for g in torch.autograd.grad(fo, parameters, retain_graph=True, materialize_grads=True)]
            )
            for fo in f
        ]
        return f.detach(), torch.stack(phi)
