"""Leave a user's module as it was found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Put `model` in evaluation mode for a while; restore modes, buffers and random state afterwards.

    In evaluation mode dropout is off and BatchNorm uses its running statistics. Autograd is on inside, whatever
    the caller's mode: the gradients of the outputs are what this library computes with.
    """
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, name, buffer, None if buffer is None else buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices), torch.inference_mode(False), torch.enable_grad():
        model.eval()
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training
            with torch.no_grad():
                for module, name, buffer, value in buffers:
                    if buffer is not None and value is not None and not _same(buffer, value):
                        buffer.copy_(value)
                    module._buffers[name] = buffer


def _same(buffer: torch.Tensor, value: torch.Tensor) -> bool:
    return buffer.shape == value.shape and bool(torch.equal(buffer.nan_to_num(), value.nan_to_num()))
