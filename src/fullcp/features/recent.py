"""Rows that were asked for lately: kept for the next time, since test points tend to need the same ones."""

from __future__ import annotations

from collections.abc import Callable
from threading import RLock

import torch
from torch import Tensor


class RecentRows:
    """Chosen rows of N, of which as many as fit are kept once they are computed. Several threads may ask.

    Parameters
    ----------
    compute : callable
        Takes indices of a few rows (a list), returns them, (n, ...).
    count : N
    chunk : how many rows may be computed at a time.
    most : how many may be kept.
    """

    def __init__(self, compute: Callable[[list[int]], Tensor], count: int, chunk: int, most: int):
        self.compute, self.chunk, self.most = compute, chunk, most
        self.kept = 0
        self._lock = RLock()
        self._place = torch.full((count,), -1)  # of each row among the kept ones
        self._store: Tensor | None = None  # room for more rows than are kept

    def __call__(self, rows: Tensor) -> Tensor:
        """The rows of some indices, (n, ...)."""
        with self._lock, torch.inference_mode(False):  # what is kept outlives the caller's mode
            wanted, back = torch.unique(rows.cpu(), return_inverse=True)
            if self.kept + len(wanted) > self.most and self.kept + self._lacks(wanted) > self.most:
                self._forget()
                if len(wanted) > self.most:
                    return self._computed(wanted)[back.to(rows.device)]
            missing = wanted[self._place[wanted] < 0]
            if len(missing):
                self._add(missing)
            assert self._store is not None
            return self._store[self._place[wanted][back].to(self._store.device)]

    def _lacks(self, rows: Tensor) -> int:
        return int((self._place[rows] < 0).sum())

    def _computed(self, rows: Tensor) -> Tensor:
        indices = rows.tolist()
        return torch.cat([self.compute(indices[i : i + self.chunk]) for i in range(0, len(indices), self.chunk)])

    def _add(self, rows: Tensor) -> None:
        found = self._computed(rows)
        taken = self.kept + len(rows)
        if self._store is None or taken > len(self._store):
            store = found.new_empty(min(self.most, max(taken, 2 * self.kept)), *found.shape[1:])
            if self._store is not None:
                store[: self.kept] = self._store[: self.kept]
            self._store = store
        self._store[self.kept : taken] = found
        self._place[rows] = torch.arange(self.kept, taken)
        self.kept = taken

    def _forget(self) -> None:
        self._place.fill_(-1)
        self._store, self.kept = None, 0
