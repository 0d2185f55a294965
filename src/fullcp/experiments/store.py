"""Trained networks on disk: a file a role, a row a fold, so that training and evaluation can run apart."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fullcp.files import read_file, write_file

_KIND = "networks"


@dataclass(frozen=True)
class Stored:
    """Networks of one role: fold `folds[i]` has weights theta[i], penalty l2[i] (one a tensor, or one) and noise[i].

    Attributes
    ----------
    lost : which networks diverged; their weights mean nothing.
    losses : validation losses a value of the grid, where there was one.
    history : an entry an ensemble: seconds, networks, device, commit.
    """

    folds: Tensor
    theta: Tensor
    l2: Tensor
    noise: Tensor
    lost: Tensor
    losses: Tensor
    history: list[dict[str, Any]] = field(default_factory=list)

    def places(self) -> dict[int, int]:
        """Fold number -> row."""
        return {number: i for i, number in enumerate(self.folds.tolist())}

    def place(self, fold: int) -> int:
        """The row of a fold, which must be there."""
        found = self.places().get(fold)
        if found is None:
            raise FileNotFoundError(f"the networks of fold {fold} are missing: run the training stage for it first")
        return found


class RunFolder:
    """The networks of one data set under ``<run folder>/<data set>/``.

    Parameters
    ----------
    folder : of the run.
    facts : what decides the weights; files of other facts are refused.
    """

    def __init__(self, folder: Path, dataset: str, facts: dict[str, Any]):
        self.path = folder / dataset
        self.facts = facts
        self._cache: dict[str, Stored] = {}

    def cached(self, role: str) -> Stored:
        """The networks of a role, read once."""
        if role not in self._cache:
            stored = self.read(role)
            if stored is None:
                raise FileNotFoundError(f"{self._file(role)} is missing: run the training stage first")
            self._cache[role] = stored
        return self._cache[role]

    def read(self, role: str) -> Stored | None:
        """The networks of a role, None where there are none yet."""
        path = self._file(role)
        if not path.exists():
            return None
        header, tensors = read_file(path, torch.device("cpu"))
        if header.get("kind") != _KIND:
            raise ValueError(f"{path} holds no networks of an experiment: name another run folder")
        if header["facts"] != self.facts:
            other = {k: v for k, v in header["facts"].items() if self.facts.get(k) != v}
            raise ValueError(
                f"{path} holds networks trained otherwise ({', '.join(f'{k}={v}' for k, v in other.items())}): name "
                "another run folder, or ask for the same"
            )
        return Stored(**tensors, history=header["history"])

    def roles(self) -> list[str]:
        """The roles that have networks."""
        return sorted(path.stem for path in self.path.glob("*.safetensors"))

    def missing(self, role: str, folds: list[int]) -> list[int]:
        """Folds without a network of this role."""
        stored = self.read(role)
        have = set() if stored is None else set(stored.folds.tolist())
        return [number for number in folds if number not in have]

    def add(self, role: str, new: Stored) -> None:
        """Put networks beside those that are there, in one write."""
        old = self.read(role)
        if old is not None:
            joined = {name: torch.cat([getattr(old, name), getattr(new, name)]) for name in _TENSORS}
            new = Stored(**joined, history=[*old.history, *new.history])
        self._cache.pop(role, None)
        self.path.mkdir(parents=True, exist_ok=True)
        tensors = {name: getattr(new, name) for name in _TENSORS}
        write_file(self._file(role), tensors, {"kind": _KIND, "facts": self.facts, "history": new.history})

    def _file(self, role: str) -> Path:
        return self.path / f"{role}.safetensors"


_TENSORS = ("folds", "theta", "l2", "noise", "lost", "losses")
