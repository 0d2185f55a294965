"""A training run on disk: written now and then, so that an interrupted one goes on where it stopped."""

from __future__ import annotations

import time
from os import PathLike
from pathlib import Path
from typing import Any

from fullcp.files import read_file, write_file
from fullcp.training.identity import identity, identity_of_networks, identity_of_weights
from fullcp.training.run import Run

_EVERY = 10.0  # seconds


class Checkpoint:
    """The file of one run.

    Parameters
    ----------
    path : where to write; a file that is there must be of the same run.
    run : the run, at its beginning.
    """

    def __init__(self, path: str | PathLike[str], run: Run):
        self.path = read_path(path)
        self._key, self._weights = _key(run), identity_of_weights(run.stack.models)
        self._last = time.monotonic()
        if self.path.exists():
            header, tensors = read_file(self.path, run.stack.theta.device)
            self._check(header)
            run.restore(tensors, header["facts"])

    def update(self, run: Run) -> None:
        """Write the run if some seconds have passed, or it is over."""
        if run.finished or time.monotonic() - self._last > _EVERY:
            tensors, facts = run.state()
            header = {"kind": "training", "key": self._key, "weights": self._weights, "facts": facts}
            write_file(self.path, tensors, header)
            self._last = time.monotonic()

    def _check(self, header: dict[str, Any]) -> None:
        """Refuse the file of another run."""
        if header.get("kind") != "training" or header["key"] != self._key:
            raise ValueError(
                f"checkpoint holds another run: networks, loss, data or settings differ. Delete it or name another "
                f"file: {self.path}"
            )
        if header["weights"] != self._weights:
            raise ValueError(
                "checkpoint holds a run that began with other weights, all else being the same: is the network given "
                "the trained one? Run the same call on the untrained network, or delete the file or name another: "
                f"{self.path}"
            )


def read_path(path: object) -> Path:
    """The path of a checkpoint, in a folder that exists."""
    if not isinstance(path, (str, PathLike)):
        raise TypeError(f"checkpoint must be a path or None, got {path!r}")
    found = Path(path)
    if not found.parent.is_dir():
        raise ValueError(f"checkpoint lies in a folder that does not exist: {found.parent}")
    if found.is_dir():
        raise ValueError(f"checkpoint is a folder, a file name is wanted: {found}")
    return found


def _key(run: Run) -> str:
    """A hash of all that decides how a run goes but for the weights it begins with."""
    pool = run.pool
    data = [pool.x, pool.y, pool.rows, pool.counts, run.l2, run.noise, run.seeds]
    return identity([identity_of_networks(run.stack.models), run.recipe, run.loss, run.watch, *data])
