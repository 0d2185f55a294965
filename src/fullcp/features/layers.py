"""What goes into the layers of a network, and what comes back to them when an output is differentiated."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fullcp.features.network import normal
from fullcp.features.outputs import as_rows

Layer = nn.Linear | nn.Conv2d
Call = tuple[Any, Tensor, Tensor]  # a module, its input and its output


@contextmanager
def recording(modules: Collection[nn.Module]) -> Iterator[list[Call]]:
    """Record each use of the modules in the forward passes inside."""
    calls: list[Call] = []

    def record(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        calls.append((module, inputs[0].detach(), output))
        return output.clone()  # so that an in-place activation leaves the recorded output alone

    handles: list[Any] = [module.register_forward_hook(record, prepend=True) for module in modules]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class Use:
    """One use of a module when n rows pass through a network.

    Attributes
    ----------
    module : the module.
    x : Tensor
        What went in.
    g : Tensor (O, ...)
        The gradient of each output in what came out.
    """

    module: Any
    x: Tensor
    g: Tensor


@dataclass(frozen=True)
class Signal:
    """One use of a layer by n rows at T positions each: T is 1 for a dense layer, the pixels of a convolution.

    The gradient of output o in the layer's weight (out, in) is, for row n, sum_t g[o, n, t] a[n, t]^T, and in its
    bias sum_t g[o, n, t].

    Attributes
    ----------
    module : the layer.
    a : Tensor (n, T, in)
        What went in; for a convolution the patches under its kernel.
    g : Tensor (O, n, T, out)
        The gradient of each output in what came out.
    """

    module: Layer
    a: Tensor
    g: Tensor

    def in_weight(self) -> Tensor:
        """The gradients of the outputs in the weight, (n, O, out in)."""
        wide = torch.promote_types(self.g.dtype, self.a.dtype)  # a network that casts inside can have two
        return torch.einsum("ontp,ntq->nopq", self.g.to(wide), self.a.to(wide)).flatten(2)

    def in_bias(self) -> Tensor:
        """The gradients of the outputs in the bias, (n, O, out)."""
        return self.g.sum(2).transpose(0, 1)


def layers_of(model: nn.Module) -> list[Layer]:
    """The layers whose signals can be had; one of a class derived from these may still use them in its own way."""
    return [
        module
        for module in model.modules()
        if isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.groups == 1)
    ]


def uses(model: nn.Module, modules: Collection[nn.Module], x: Tensor) -> tuple[Tensor, list[Use]]:
    """Outputs (n, O) of the rows x (n, ...), and each use of the modules on the way: one backward pass an output."""
    with recording(modules) as calls:
        f = as_rows(model(normal(x)), len(x))
    calls = [call for call in calls if call[2].requires_grad]
    outputs = [z for _, _, z in calls]
    back = [
        torch.autograd.grad(fo, outputs, torch.ones_like(fo), retain_graph=True, materialize_grads=True)
        for fo in f.unbind(1)
        if calls
    ]
    found = [
        Use(module, a, torch.stack([gradients[k] for gradients in back])) for k, (module, a, _) in enumerate(calls)
    ]
    return f.detach(), found


def signals(model: nn.Module, layers: Collection[nn.Module], x: Tensor) -> list[Signal]:
    """The signals of each use of the layers when `model` predicts the rows x (n, ...): one backward pass an output.

    A layer that does not see row by row has its positions in the place of rows; a use that gives what no such layer
    would is left out.
    """
    found = []
    for use in uses(model, layers, x)[1]:
        module, a, g = use.module, use.x, use.g  # g (O, n, ...)
        if not is_usual(use):
            continue
        if isinstance(module, nn.Conv2d):
            found.append(Signal(module, patches(module, a), g.flatten(3).mT))
        else:
            positions = a.shape[:-1].numel()
            n = len(x) if positions % len(x) == 0 else positions
            a = a.reshape(n, positions // n, -1)
            found.append(Signal(module, a, g.reshape(len(g), *a.shape[:2], -1)))
    return found


def has_own_forward(layer: nn.Module) -> bool:
    """Whether the class of a layer, derived from PyTorch's, does something of its own with the weight."""
    kind = nn.Linear if isinstance(layer, nn.Linear) else nn.Conv2d
    return type(layer).forward is not kind.forward


def is_usual(use: Use) -> bool:
    """Whether what came out of a module has the shape that its class stands for."""
    layer, a, g = use.module, use.x, use.g
    if not isinstance(layer, (nn.Linear, nn.Conv2d)):
        return True
    if not has_own_forward(layer):
        return isinstance(layer, nn.Linear) or a.ndim == 4
    if isinstance(layer, nn.Linear):
        return a.shape[-1] == layer.in_features and g.shape[1:] == (*a.shape[:-1], layer.out_features)
    if a.ndim != 4 or a.shape[1] != layer.in_channels:
        return False
    return g.shape[1:3] == (len(a), layer.out_channels) and patches(layer, a).shape[1] == g.shape[3:].numel()


def patches(layer: nn.Conv2d, x: Tensor) -> Tensor:
    """What the kernel of a convolution sees of x (n, channels, height, width) at each position, (n, T, in)."""
    if isinstance(layer.padding, str) or layer.padding_mode != "zeros":
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        x, padding = F.pad(x, layer._reversed_padding_repeated_twice, mode=mode), (0, 0)
    else:
        padding = layer.padding  # type: ignore[assignment]
    return F.unfold(x, layer.kernel_size, layer.dilation, padding, layer.stride).mT
