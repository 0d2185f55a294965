"""One file for tensors and facts: safetensors with a JSON header, written whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

_KEY = "fullcp"
_FORMAT = 1


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
        save_file(_separate(tensors), temporary, metadata)
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _separate(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as safetensors wants them, contiguous and without shared memory; copied only where they are not."""
    done, seen = {}, set()
    for name, t in tensors.items():
        t = t.detach().contiguous()
        storage = t.untyped_storage()
        if storage.data_ptr() in seen or storage.nbytes() != t.nbytes:
            t = t.clone()
        seen.add(t.untyped_storage().data_ptr())
        done[name] = t
    return done


def read_file(path: str | Path, device: torch.device) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Header and tensors of a file that `write_file` made."""
    with _opened(path, str(device)) as file:
        return _header(path, file), {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118


def read_header(path: str | Path) -> dict[str, Any]:
    """The header alone."""
    with _opened(path, "cpu") as file:
        return _header(path, file)


def _opened(path: str | Path, device: str) -> Any:
    try:
        return safe_open(os.fspath(path), framework="pt", device=device)
    except SafetensorError as error:
        raise ValueError(f"path is no fullcp file: {path} ({error})") from error


def _header(path: str | Path, file: Any) -> dict[str, Any]:
    metadata = file.metadata() or {}
    if _KEY not in metadata:
        raise ValueError(f"path is no fullcp file: {path}")
    header: dict[str, Any] = json.loads(metadata[_KEY])
    if header["format"] != _FORMAT:
        raise ValueError(f"path is in format {header['format']}, this version of fullcp reads {_FORMAT}: {path}")
    return header


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
