"""Networks that are chains of linear layers and activations: batched matrix products, derivatives by hand.

Everything is written into buffers made once. Fresh memory for the hidden activations of a hundred networks costs
three times what computing them does, and autograd asks for it at every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fullcp.training.activations import Activation, activation_of
from fullcp.training.stack import ALL, LossGradient, NotStackableError, Stack, trainable


@dataclass(frozen=True)
class _Linear:
    """Where weight (out, in) and bias (out,) of a layer stand in theta."""

    inputs: int
    outputs: int
    weight: slice
    bias: slice | None

    def weights_of(self, matrix: Tensor) -> Tensor:
        """The weights (B, out, in) in a matrix (B, P)."""
        return matrix[:, self.weight].view(-1, self.outputs, self.inputs)


class Chain(Stack):
    """A stack of nn.Sequential networks of nn.Linear layers and elementwise activations."""

    name = "batched matrix products"
    may_draw = False

    def __init__(self, models: Sequence[nn.Module]):
        steps = _read(models[0])
        if any([type(m) for m in _flat(model)] != [type(m) for m in _flat(models[0])] for model in models):
            raise NotStackableError("the networks are not alike")
        super().__init__(models)
        self.steps = steps
        self.inputs = next(step for step in steps if isinstance(step, _Linear)).inputs
        self._buffers: dict[tuple[int, int], tuple[list[Tensor], list[Tensor]]] = {}

    def predict(self, x: Tensor) -> Tensor:
        """Outputs (B, n, O)."""
        done = []
        for block in self.blocks(self._bytes(x)):
            theta, f = self.theta[block], x[block]
            for step in self.steps:
                f = _apply(step, theta, f, None)
            done.append(f.clone() if f.data_ptr() == x.data_ptr() else f)
        return torch.cat(done)

    def gradients(self, x: Tensor, loss: LossGradient, counts: Tensor | None = None) -> None:
        """Fill `grad`; see `Stack`."""
        with torch.no_grad():
            for block in self.blocks(self._bytes(x)):
                theta, grad, a = self.theta[block], self.grad[block], x[block]
                forward, backward = self._workspace(len(theta), x)
                inputs = []
                for step, out in zip(self.steps, forward, strict=True):
                    inputs.append(a)
                    a = _apply(step, theta, a, out)
                g = loss(block, a)
                for i in reversed(range(len(self.steps))):
                    step = self.steps[i]
                    if isinstance(step, Activation):
                        step.backward(g, inputs[i], forward[i])
                        continue
                    _weight_gradient(step, grad, inputs[i], g)
                    if i == self._first:
                        break
                    g = _signal(step, theta, g, backward[i])

    def jacobian(self, x: Tensor, block: slice = ALL) -> tuple[Tensor, Tensor]:
        """Outputs f (b, n, O) and gradients phi (b, n, O, P)."""
        with torch.no_grad():
            theta = self.theta[block]
            a, inputs, outputs = x, [], []
            for step in self.steps:
                inputs.append(a)
                a = _apply(step, theta, a, None)
                outputs.append(a)
            O = a.shape[2]
            phi = a.new_zeros(len(theta), x.shape[1], O, self.size)
            for o in range(O):
                g = torch.zeros_like(a)
                g[:, :, o] = 1.0
                for i in reversed(range(len(self.steps))):
                    step = self.steps[i]
                    if isinstance(step, Activation):
                        g = g.clone()
                        step.backward(g, inputs[i], outputs[i])
                        continue
                    torch.mul(
                        g.unsqueeze(3),
                        inputs[i].unsqueeze(2),
                        out=phi[:, :, o, step.weight].view(*g.shape, step.inputs),
                    )
                    if step.bias is not None:
                        phi[:, :, o, step.bias] = g
                    if i == self._first:
                        break
                    g = torch.bmm(g, step.weights_of(theta))
        return a, phi

    def keep(self, which: Tensor) -> None:
        """Go on with some of the networks."""
        super().keep(which)
        self._buffers.clear()

    @property
    def _first(self) -> int:
        """The first linear layer: nothing before it has weights."""
        return next(i for i, step in enumerate(self.steps) if isinstance(step, _Linear))

    def _widths(self) -> list[int]:
        """The number of columns after each step."""
        widths, width = [], self.inputs
        for step in self.steps:
            width = step.outputs if isinstance(step, _Linear) else width
            widths.append(width)
        return widths

    def _bytes(self, x: Tensor) -> int:
        """Memory for the buffers of one network."""
        return 2 * x.element_size() * x.shape[1] * sum(self._widths())

    def _workspace(self, networks: int, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Outputs of each step, and the signals that go into each linear layer."""
        key = (networks, x.shape[1])
        if key not in self._buffers:
            widths = self._widths()
            forward = [x.new_empty(networks, x.shape[1], width) for width in widths]
            # Only layers behind the first send a signal back.
            needed = [isinstance(step, _Linear) and i > self._first for i, step in enumerate(self.steps)]
            into = zip(needed, [self.inputs, *widths[:-1]], strict=True)
            backward = [x.new_empty(networks, x.shape[1] if need else 0, width) for need, width in into]
            self._buffers[key] = forward, backward
        return self._buffers[key]


def _apply(step: _Linear | Activation, theta: Tensor, a: Tensor, out: Tensor | None) -> Tensor:
    """One step for all networks: inputs a (B, n, in) to (B, n, out)."""
    if isinstance(step, Activation):
        out = torch.empty_like(a) if out is None else out
        step.forward(a, out)
        return out
    W = step.weights_of(theta)
    if step.bias is None:
        return torch.bmm(a, W.mT, out=out)
    if step.inputs == 1:  # a thin product takes 20 times longer than writing its result down
        return torch.addcmul(theta[:, None, step.bias], a, W.mT, out=out)
    return torch.baddbmm(theta[:, None, step.bias], a, W.mT, out=out)


def _weight_gradient(step: _Linear, grad: Tensor, a: Tensor, g: Tensor) -> None:
    """Sum over the rows of signal g (B, n, out) times input a (B, n, in), and of the signal."""
    # The thin factor first: with few inputs g^T a is four times slower than a^T g.
    W = torch.bmm(a.mT, g).mT if step.inputs < step.outputs else torch.bmm(g.mT, a)
    step.weights_of(grad).copy_(W)
    if step.bias is not None:
        torch.sum(g, 1, out=grad[:, step.bias])


def _signal(step: _Linear, theta: Tensor, g: Tensor, out: Tensor) -> Tensor:
    """The signal that goes back through a layer, (B, n, in)."""
    W = step.weights_of(theta)
    return torch.mul(g, W, out=out) if step.outputs == 1 else torch.bmm(g, W, out=out)


def _flat(module: nn.Module) -> list[nn.Module]:
    """The parts of nested nn.Sequential modules, in the order they are applied."""
    if type(module) is nn.Sequential:
        return [part for child in module for part in _flat(child)]
    return [module]


def _read(model: nn.Module) -> list[_Linear | Activation]:
    """A module as a chain of steps."""
    if any(_is_hooked(module) for module in model.modules()):
        raise NotStackableError("a module has hooks")
    places: dict[int, slice] = {}
    start = 0
    parameters = trainable(model)
    for p in parameters.values():
        places[id(p)] = slice(start, start + p.numel())
        start += p.numel()
    if len({p.dtype for p in model.parameters()}) != 1 or len(parameters) != len(list(model.parameters())):
        raise NotStackableError("a parameter is frozen, or of another dtype")
    steps: list[_Linear | Activation] = []
    used = 0
    for part in _flat(model):
        if type(part) is nn.Linear:
            bias = None if part.bias is None else places[id(part.bias)]
            steps.append(_Linear(part.in_features, part.out_features, places[id(part.weight)], bias))
            used += sum(p.numel() for p in part.parameters())
            continue
        activation = activation_of(part)
        if activation is None:
            raise NotStackableError(f"{type(part).__name__} is neither nn.Linear nor a known activation")
        steps.append(activation)
    if not parameters or used != start:
        raise NotStackableError("a layer is used twice, or there is none")
    return steps


def _is_hooked(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or nn.utils.parametrize.is_parametrized(module)
    )
