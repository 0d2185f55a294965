"""A training run on disk: written now and then, so that an interrupted one goes on where it stopped."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fullcp.files import read_file, write_file
from fullcp.training.run import Run

_EVERY = 10.0  # seconds


class Checkpoint:
    """The file of one run.

    Parameters
    ----------
    path : where to write; a file that is there must be of the same run.
    run : the run, at its beginning.
    settings : what else decides how the run goes, for JSON.
    """

    def __init__(self, path: str | Path, run: Run, settings: dict[str, Any]):
        self.path = Path(path)
        self._key = _key(run, settings)
        self._last = time.monotonic()
        if not self.path.parent.is_dir():
            raise ValueError(f"checkpoint lies in a folder that does not exist: {self.path.parent}")
        if self.path.is_dir():
            raise ValueError(f"checkpoint is a folder, a file name is wanted: {self.path}")
        if self.path.exists():
            header, tensors = read_file(self.path, run.stack.theta.device)
            if header.get("kind") != "training" or header["key"] != self._key:
                raise ValueError(
                    f"checkpoint holds another run: networks, data or settings differ. Delete it or name another "
                    f"file: {self.path}"
                )
            run.restore(tensors, header["facts"])

    def update(self, run: Run) -> None:
        """Write the run if some seconds have passed, or it is over."""
        if run.finished or time.monotonic() - self._last > _EVERY:
            tensors, facts = run.state()
            write_file(self.path, tensors, {"kind": "training", "key": self._key, "facts": facts})
            self._last = time.monotonic()


def _key(run: Run, settings: dict[str, Any]) -> str:
    """A hash of all that decides how a run goes."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    tensors: list[Tensor] = [run.stack.theta, run.pool.x, run.pool.y, run.pool.rows, run.pool.counts]
    for tensor in [*tensors, run.l2, run.noise, run.seeds]:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
