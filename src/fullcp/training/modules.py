"""Networks of any kind in one stack: by torch.func side by side, or one after the other."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, stack_module_state, vmap

from fullcp.features.outputs import as_rows
from fullcp.training.identity import identity_of_networks
from fullcp.training.stack import ALL, LossGradient, NotStackableError, Stack, trainable


class _Modules(Stack):
    """What the two ways share: weights handed to modules, gradients by autograd."""

    def __init__(self, models: Sequence[nn.Module]):
        super().__init__(models)
        self.dtypes = [p.dtype for p in trainable(models[0]).values()]

    def _weights(self, theta: Tensor) -> dict[str, Tensor]:
        """Theta (..., P) as tensors under the modules' names."""
        parts = torch.split(theta, self.sizes, dim=-1)
        named = zip(self.shapes.items(), parts, self.dtypes, strict=True)
        return {name: part.reshape((*theta.shape[:-1], *shape)).to(dtype) for (name, shape), part, dtype in named}


class Functional(_Modules):
    """A stack that torch.func vectorises: one forward pass of a module whose weights have one more dimension."""

    name = "torch.func"

    def __init__(self, models: Sequence[nn.Module]):
        super().__init__(models)
        # What does not train may differ too: frozen weights, buffers of constants.
        parameters, buffers = stack_module_state(list(self.models))
        names = set(self.shapes)
        self._constants = {k: v.detach() for k, v in {**parameters, **buffers}.items() if k not in names}
        self.skeleton = copy.deepcopy(self.models[0]).requires_grad_(False)

    def predict(self, x: Tensor) -> Tensor:
        """Outputs (B, n, O)."""
        self.skeleton.eval()
        with torch.no_grad():
            return self._forward(slice(0, len(self)), self.theta, x)

    def gradients(self, x: Tensor, loss: LossGradient, counts: Tensor | None = None) -> None:
        """Fill `grad`; see `Stack`."""
        self.skeleton.train()
        for block in self.blocks(self._bytes(x)):
            with torch.enable_grad():
                theta = self.theta[block].detach().requires_grad_()
                f = self._forward(block, theta, x[block])
            (self.grad[block],) = torch.autograd.grad(f, theta, loss(block, f.detach()))

    def jacobian(self, x: Tensor, block: slice = ALL) -> tuple[Tensor, Tensor]:
        """Outputs f (b, n, O) and gradients phi (b, n, O, P)."""
        self.skeleton.eval()

        def one_row(theta: Tensor, constants: dict[str, Tensor], row: Tensor) -> tuple[Tensor, Tensor]:
            f = as_rows(functional_call(self.skeleton, {**self._weights(theta), **constants}, (row[None],)), 1)[0]
            return f, f

        rows = vmap(jacrev(one_row, has_aux=True), in_dims=(None, None, 0))
        constants = {name: values[block] for name, values in self._constants.items()}
        phi, f = vmap(rows)(self.theta[block], constants, x)
        return f.detach(), phi.detach()

    def keep(self, which: Tensor) -> None:
        """Go on with some of the networks."""
        super().keep(which)
        self._constants = {name: values[which] for name, values in self._constants.items()}

    def _forward(self, block: slice, theta: Tensor, x: Tensor) -> Tensor:
        def one(theta: Tensor, constants: dict[str, Tensor], x: Tensor) -> Tensor:
            return as_rows(functional_call(self.skeleton, {**self._weights(theta), **constants}, (x,)), len(x))

        constants = {name: values[block] for name, values in self._constants.items()}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="There is a performance drop")
            return vmap(one, randomness="different")(theta, constants, x)

    def _bytes(self, x: Tensor) -> int:
        """A guess at the memory that autograd keeps for one network."""
        return 8 * x.element_size() * x.shape[1] * (x[0, 0].numel() + self.size // max(1, x[0, 0].numel()))


class Loop(_Modules):
    """Networks run one after the other, for modules that torch.func cannot stack: slow, and good for any module."""

    name = "one network after the other"

    def __init__(self, models: Sequence[nn.Module]):
        super().__init__(models)
        self.copies = [copy.deepcopy(model) for model in models]
        self._remembered_buffers = [_buffers(module) for module in self.copies]

    def predict(self, x: Tensor) -> Tensor:
        """Outputs (B, n, O)."""
        with torch.no_grad():
            return torch.stack([self._forward(b, self.theta[b], rows, train=False) for b, rows in enumerate(x)])

    def gradients(self, x: Tensor, loss: LossGradient, counts: Tensor | None = None) -> None:
        """Fill `grad`; a network sees its own rows only, for the sake of BatchNorm."""
        for b, rows in enumerate(x):
            count = len(rows) if counts is None else int(counts[b])
            if count == 0:
                self.grad[b] = 0.0
                continue
            with torch.enable_grad():
                theta = self.theta[b].detach().requires_grad_()
                f = self._forward(b, theta, rows[:count], train=True)
            padded = f.detach().new_zeros(1, len(rows), f.shape[1])
            padded[0, :count] = f.detach()
            g = loss(slice(b, b + 1), padded)[0, :count]
            (self.grad[b],) = torch.autograd.grad(f, theta, g)

    def jacobian(self, x: Tensor, block: slice = ALL) -> tuple[Tensor, Tensor]:
        """Outputs f (b, n, O) and gradients phi (b, n, O, P)."""
        fs, phis = [], []
        for b, rows in zip(range(len(self))[block], x, strict=True):
            with torch.enable_grad():
                theta = self.theta[b].detach().requires_grad_()
                f = torch.cat([self._forward(b, theta, row[None], train=False) for row in rows])
                gradients = [torch.autograd.grad(value, theta, retain_graph=True)[0] for value in f.reshape(-1)]
            fs.append(f.detach())
            phis.append(torch.stack(gradients).view(*f.shape, -1))
        return torch.stack(fs), torch.stack(phis)

    def remember(self, which: Tensor) -> None:
        """Keep present weights, and the buffers with them."""
        super().remember(which)
        for b in which.nonzero()[:, 0].tolist():
            self._remembered_buffers[b] = _buffers(self.copies[b])

    def recall(self) -> None:
        """Go back to the weights and buffers kept last."""
        super().recall()
        for module, values in zip(self.copies, self._remembered_buffers, strict=True):
            _set_buffers(module, values)

    def keep(self, which: Tensor) -> None:
        """Go on with some of the networks."""
        super().keep(which)
        self.copies = [self.copies[i] for i in which.tolist()]
        self._remembered_buffers = [self._remembered_buffers[i] for i in which.tolist()]

    def weights(self, b: int) -> list[Tensor]:
        """Weights and buffers of network b."""
        return [*super().weights(b), *_buffers(self.copies[b])]

    def state(self) -> dict[str, Tensor]:
        """Weights and buffers."""
        tensors = super().state()
        for b, module in enumerate(self.copies):
            for i, value in enumerate(_buffers(module)):
                tensors[f"buffer.{b}.{i}"] = value
                tensors[f"remembered_buffer.{b}.{i}"] = self._remembered_buffers[b][i]
        return tensors

    def restore(self, state: dict[str, Tensor]) -> None:
        """Take up what `state` gave."""
        super().restore(state)
        for b, module in enumerate(self.copies):
            count = len(list(module.buffers()))
            _set_buffers(module, [state[f"buffer.{b}.{i}"] for i in range(count)])
            self._remembered_buffers[b] = [state[f"remembered_buffer.{b}.{i}"] for i in range(count)]

    def _forward(self, b: int, theta: Tensor, x: Tensor, *, train: bool) -> Tensor:
        module = self.copies[b].train(train)
        return as_rows(functional_call(module, self._weights(theta), (x,)), len(x))


def _buffers(module: nn.Module) -> list[Tensor]:
    return [buffer.detach().clone() for buffer in module.buffers()]


def _set_buffers(module: nn.Module, values: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for buffer, value in zip(module.buffers(), values, strict=True):
            buffer.copy_(value)


def stackable(models: Sequence[nn.Module], x: Tensor) -> None:
    """Refuse networks that torch.func cannot run side by side, as a trial in training mode on rows x (n, ...) shows.

    BatchNorm writes to its buffers, and would count rows that only fill up a batch. Networks that act otherwise in
    training than in evaluation, where all of them are tried, must not differ in a constant: a rate of dropout, say.
    """
    first = models[0]
    if len({tuple(p.shape for p in model.parameters()) for model in models}) > 1:
        raise NotStackableError("the networks are not alike")
    if any(type(m) is not type(n) for model in models[1:] for m, n in zip(first.modules(), model.modules())):  # noqa: B905
        raise NotStackableError("the networks are not alike")
    trial = copy.deepcopy(first).train()
    before = [buffer.clone() for buffer in trial.buffers()]
    with torch.random.fork_rng(), torch.no_grad():
        state = _random_state(x.device)
        trained = trial(x)
        draws = not torch.equal(state, _random_state(x.device))
        if any(not torch.equal(a, b) for a, b in zip(before, trial.buffers(), strict=True)):
            raise NotStackableError("a buffer changes in training")
        same = not draws and torch.equal(trained, trial.eval()(x))
    if not same and len({identity_of_networks([model]) for model in {id(m): m for m in models}.values()}) > 1:
        raise NotStackableError("the networks differ in more than their weights")


def _random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
