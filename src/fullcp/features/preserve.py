"""Leave a user's module as it was found."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from threading import Lock, RLock
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

# Modes and hooks belong to the module, so two threads must not borrow the same one at a time.
_LOCKS: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
_LOCKS_LOCK = Lock()


@contextmanager
def preserved(model: nn.Module, trainable: Collection[str] | None = None) -> Iterator[None]:
    """Borrow `model` in evaluation mode; restore modes, requires_grad, buffers and random state afterwards.

    In evaluation mode dropout is off and BatchNorm uses its running statistics. Autograd is on inside, whatever
    the caller's mode: the gradients of the outputs are what this library computes with. With `trainable`, just the
    parameters of these names have requires_grad, so that a network frozen after the fit still gives its gradients.
    """
    with _lock_of(model):
        attributes = [(module, dict(vars(module))) for module in model.modules()]  # modes, and what forward leaves
        renormed = [
            (module.weight, module.weight.detach().clone())
            for module in model.modules()
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None
        ]
        flags = [(p, p.requires_grad, name) for name, p in model.named_parameters()]
        buffers = [
            (module, name, buffer, None if buffer is None else buffer.detach().clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
        ]
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
                for module, before in attributes:
                    _restore_attributes(module, before)
                with torch.no_grad():
                    for weight, kept in renormed:  # these layers write to their weights in each forward pass
                        weight.copy_(kept)
                    for module, name, buffer, value in buffers:
                        if buffer is not None and value is not None and not _same(buffer, value):
                            buffer.copy_(value)
                        module._buffers[name] = buffer


def _restore_attributes(module: nn.Module, before: dict[str, Any]) -> None:
    """Undo what a forward pass set on the module itself: a tensor kept there may be of no use outside of it."""
    now = vars(module)
    for name in [name for name in now if name not in before]:
        del now[name]
    for name, value in before.items():
        if now.get(name, _lock_of) is not value:
            now[name] = value


def _lock_of(model: nn.Module) -> Any:
    with _LOCKS_LOCK:
        return _LOCKS.setdefault(model, RLock())


def _same(buffer: torch.Tensor, value: torch.Tensor) -> bool:
    return buffer.shape == value.shape and bool(torch.equal(buffer.nan_to_num(), value.nan_to_num()))
