"""Who the model was: a file does not hold the network, but must recognise it."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from fullcp.features.preserve import BORROWING, unwrap

_SMALL = 2**18  # bytes: a quarter of a millisecond to hash


class Fingerprint:
    """Recognises the weights and buffers of a module again.

    Of a small network the bytes are compared each time. For a large one a look at the versions and addresses of its
    tensors must do, and the bytes follow only when one of them has changed: what is written through `.data` is not
    noticed there.
    """

    def __init__(self, model: nn.Module):
        self._marks = _marks(model)
        self._digest = _digest(model)
        self._small = sum(t.numel() * t.element_size() for t in _tensors(model).values()) <= _SMALL

    def digest(self) -> str:
        """A hash of all weights and buffers."""
        return self._digest

    def matches(self, model: nn.Module) -> bool:
        """Whether the weights and buffers are still the same numbers."""
        with BORROWING:
            marks = _marks(model)
            if marks == self._marks and not self._small:
                return True
            if _digest(model) != self._digest:
                return False
            self._marks = marks
            return True


def _marks(model: nn.Module) -> list[tuple[int, int]]:
    return [(t.data_ptr(), -1 if t.is_inference() else t._version) for t in _tensors(model).values()]


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Weights and buffers, those that a state_dict leaves out included."""
    model = unwrap(model)
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name.replace("_orig_mod.", ""): tensor for name, tensor in named.items()}


def _digest(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(_tensors(model).items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def alike(found: Tensor | None, expected: Tensor) -> bool:
    """Whether two echoes are of one network: other devices and versions round otherwise, no more."""
    if found is None or found.shape != expected.shape:
        return False
    return bool((found - expected).abs().amax() <= 1e-2 * (expected.abs().amax() + 1e-12))
