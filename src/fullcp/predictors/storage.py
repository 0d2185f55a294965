"""One file a predictor: safetensors with a JSON header, written whole or not at all; and who the model was."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from fullcp.features.preserve import unwrap

_KEY = "fullcp"
_FORMAT = 1
_SMALL = 2**18  # bytes: a quarter of a millisecond to hash


def write_file(path: str | Path, tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
    """Write tensors and header to `path` by way of a temporary file beside it."""
    path = Path(path)
    if not path.parent.is_dir():
        raise ValueError(f"path lies in a folder that does not exist: {path.parent}")
    if path.is_dir():
        raise ValueError(f"path is a folder, a file name is wanted: {path}")
    metadata = {_KEY: json.dumps({"format": _FORMAT, **header})}
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        save_file({name: t.detach().contiguous().clone() for name, t in tensors.items()}, temporary, metadata)
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def read_file(path: str | Path, device: torch.device) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Header and tensors of a file that `write_file` made."""
    try:
        with safe_open(os.fspath(path), framework="pt", device=str(device)) as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (no mapping)
    except SafetensorError as error:
        raise ValueError(f"path is no fullcp file: {path} ({error})") from error
    if _KEY not in metadata:
        raise ValueError(f"path is no fullcp file: {path}")
    header = json.loads(metadata[_KEY])
    if header["format"] != _FORMAT:
        raise ValueError(f"path is in format {header['format']}, this version of fullcp reads {_FORMAT}: {path}")
    return header, tensors


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


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
