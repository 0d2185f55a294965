"""Leave a user's module as it was found."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any

import torch
from torch import Tensor, nn

# Modes, hooks and what torch.func puts in place of weights belong to modules, and two networks may share some: one
# network at a time is borrowed, and who only reads its weights waits for it to be given back.
BORROWING = RLock()


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside of a compiled or data-parallel one: the one whose layers take hooks."""
    while True:
        inner = model.module if isinstance(model, nn.DataParallel) else getattr(model, "_orig_mod", model)
        if inner is model:
            return model
        model = inner


def parameters_by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters under the names they have without compilation."""
    return {name.replace("_orig_mod.", ""): p for name, p in model.named_parameters()}


@contextmanager
def preserved(model: nn.Module, trainable: Collection[str] | None = None, *, writes: bool = True) -> Iterator[None]:
    """Borrow `model` in evaluation mode; restore modes, requires_grad, attributes, buffers and random state afterwards.

    In evaluation mode dropout is off and BatchNorm uses its running statistics. Autograd is on inside, whatever
    the caller's mode: the gradients of the outputs are what this library computes with.

    Parameters
    ----------
    trainable : names of parameters
        Just these have requires_grad inside, so that a network frozen after the fit still gives its gradients.
    writes : bool
        Whether the network may write to its buffers (or embedding weights) in evaluation mode; if it is known not
        to, they need not be copied.
    """
    with BORROWING:
        modes = [(module, module.training) for module in model.modules()]
        insides = [_Inside(module) for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
        flags = [(p, p.requires_grad, name) for name, p in parameters_by_name(model).items()]
        values = [(tensor, tensor.detach().clone()) for tensor in written_tensors(model)] if writes else []
        devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
        with torch.random.fork_rng(devices=devices), torch.inference_mode(False), torch.enable_grad():
            try:
                model.eval()
                if trainable is not None:
                    for p, flag, name in flags:
                        if flag != (name in trainable):
                            p.requires_grad_(not flag)
                yield
            finally:
                for p, flag, _ in flags:
                    if p.requires_grad != flag:
                        p.requires_grad_(flag)
                built = [inside.restore() for inside in insides]
                for module, mode in modes:
                    module.training = mode
                with torch.no_grad():
                    for tensor, value in values:
                        if not _same(tensor, value):
                            tensor.copy_(value)
        if any(built):
            raise ValueError("model builds parts of itself in its first forward pass: run it on one batch first")


def written_tensors(model: nn.Module) -> list[Tensor]:
    """What a module may write to in evaluation mode: its buffers, and weights that a layer renormalises."""
    renormed = [
        module.weight
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None
    ]
    return [*model.buffers(), *renormed]


class _Inside:
    """What a module holds: plain attributes, and the tables of its parts."""

    def __init__(self, module: nn.Module):
        self.module = module
        self.attributes = dict(vars(module))
        tables: list[Any] = [module._modules, module._parameters, module._buffers]
        self.tables = [(table, dict(table)) for table in tables]

    def restore(self) -> bool:
        """Put everything back; whether parameters or modules had come or gone."""
        built = False
        for table, before in self.tables:
            if dict(table).keys() != before.keys() or any(table[key] is not value for key, value in before.items()):
                built |= table is not self.module._buffers
                table.clear()
                table.update(before)
        now: dict[str, Any] = vars(self.module)
        for name in [name for name in now if name not in self.attributes]:
            del now[name]
        for name, value in self.attributes.items():
            if name not in now or now[name] is not value:
                now[name] = value
        return built


def _same(tensor: Tensor, value: Tensor) -> bool:
    return tensor.shape == value.shape and bool(((tensor == value) | (tensor.isnan() & value.isnan())).all())
