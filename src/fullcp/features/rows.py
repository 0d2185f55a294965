"""phi of a whole data set, in chunks: held in memory where it fits, computed again where it does not."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Lock
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fullcp.features.jacobian import Jacobian
from fullcp.features.recent import RecentRows
from fullcp.features.symmetric import add_gram, mirror
from fullcp.inputs import check_all_finite
from fullcp.memory import rows_within
from fullcp.progress import track
from fullcp.sources import Inputs

_MAKING = Lock()
RowIndex: TypeAlias = slice | Tensor
"""Some rows, one after the other or by their indices."""


class FeatureRows:
    """Gradients phi of all N rows of x, handed out in chunks within a memory budget.

    Parameters
    ----------
    jacobian : the model's gradients.
    x : Tensor or StoredRows (N, ...)
    memory : int
        Budget in bytes. Half of it may hold the gradients (in the network's own dtype), an eighth a chunk.

    Attributes
    ----------
    kept : dict
        What a curvature learned of these rows before l2 was known, under its name, for the fit to take up.
    """

    def __init__(self, jacobian: Jacobian, x: Inputs, *, memory: int):
        self.jacobian = jacobian
        self.x = x
        self.count, self.outputs, self.size = len(x), jacobian.outputs, jacobian.size
        self.memory = memory
        self.chunk = jacobian.rows_per_chunk(memory // 8)
        self.kept: dict[str, Any] = {}
        self.holds = False
        self._held: Tensor | None = None  # (N, O, D)
        self._gram: Tensor | None = None  # (D, D)
        self._predictions: Tensor | None = None  # (N, O), float64
        self._recent: RecentRows | None = None

    def hold(self) -> None:
        """Keep the gradients from the next pass on, where they fit: further passes will come."""
        width = torch.finfo(self.jacobian.dtype).bits // 8
        self.holds = self.count * self.outputs * self.size * width <= self.memory // 2

    def release(self) -> None:
        """Let go of what was held."""
        self.holds, self._held, self._gram, self._recent = False, None, None, None

    def forgo(self) -> None:
        """No gradients will be asked for: let go of what was held, and make chunks as large as the rows allow."""
        self.release()
        self.chunk = self.jacobian.rows_per_pass(self.memory // 8)

    def gram(self, *, keep: bool = False) -> Tensor:
        """sum_i phi_i phi_i^T, float64 (D, D); with `keep`, the next call has it without another pass."""
        S, self._gram = self._gram, None
        if S is None:
            S = torch.zeros(self.size, self.size, dtype=torch.float64, device=self.x.device)
            for _, phi in self.chunks("curvature"):
                add_gram(S, phi.flatten(0, 1).double())
            mirror(S)
        if keep:
            self._gram = S
        return S

    def sample(self, most: int) -> Tensor:
        """A few rows of x, spread over all."""
        return self.x[:: max(1, self.count // most)][:most]

    def __getstate__(self) -> dict[str, Any]:
        """For pickles and copies: without gradients, which may be large and can be had again."""
        return {**vars(self), "_held": None, "_gram": None, "_recent": None, "kept": {}}

    def slices(self) -> list[slice]:
        """The chunks of rows, in order."""
        return [slice(start, min(start + self.chunk, self.count)) for start in range(0, self.count, self.chunk)]

    def chunks(self, description: str = "gradients") -> Iterator[tuple[slice, Tensor]]:
        """Each chunk of rows with its phi (n, O, D), in the network's dtype."""
        if self._held is not None:
            for rows in self.slices():
                yield rows, self._held[rows]
            return
        shape, device = (self.count, self.outputs), self.x.device
        held = torch.empty(*shape, self.size, dtype=self.jacobian.dtype, device=device) if self.holds else None
        predictions = torch.empty(*shape, dtype=torch.float64, device=device)
        slices = self.slices()
        for rows in track(slices, description, len(slices)):
            f, phi = self.jacobian(self.x[rows])
            check_all_finite(rows.start, {"outputs": f, "gradients": phi})
            predictions[rows] = f.double()
            if held is not None:
                held[rows] = phi
            yield rows, phi
        self._predictions = predictions
        self._held = held

    def block(self, rows: RowIndex) -> Tensor:
        """Phi of some rows, (n, O, D).

        Where they are not held, a slice may have no more than `chunk` rows, and rows by their indices are kept for
        the next time, within a sixth of the budget.
        """
        if self._held is None and self.holds:
            for _ in self.chunks():
                pass
        if self._held is not None:
            return self._held[rows] if isinstance(rows, slice) else self._held.index_select(0, rows)
        if isinstance(rows, slice):
            return self._computed(rows)
        with _MAKING, torch.inference_mode(False):
            if self._recent is None:
                width = self.outputs * self.size * torch.finfo(self.jacobian.dtype).bits // 8
                most = rows_within(self.memory // 6, width, at_most=self.count)
                self._recent = RecentRows(self._computed, self.count, self.chunk, most)
            recent = self._recent
        return recent(rows)

    def _computed(self, rows: slice | list[int]) -> Tensor:
        f, phi = self.jacobian(self.x[rows])
        check_all_finite(rows.start if isinstance(rows, slice) else None, {"outputs": f, "gradients": phi})
        return phi

    @property
    def predictions(self) -> Tensor:
        """The model's outputs for all rows, float64 (N, O)."""
        if self._predictions is None:
            size = self.jacobian.rows_per_pass(self.memory // 8)
            # Into one tensor: small ones would settle where the rows of a chunk were, and memory grow by a chunk each.
            found = torch.empty(self.count, self.outputs, dtype=torch.float64, device=self.x.device)
            for i in range(0, self.count, size):
                found[i : i + size] = self.jacobian.predict(self.x[i : i + size])
            self._predictions = found
        return self._predictions
