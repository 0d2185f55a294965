"""Calibration rows that `fit` was given, too: the commonest way to lose the guarantee of a split method."""

from __future__ import annotations

import torch
from torch import Tensor

from fullcp.inputs import Rows
from fullcp.memory import rows_within
from fullcp.notices import warn

_CHUNK = 2**22  # bytes at a time: no more than the smallest budgets have
_WHOLE_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MANY = 0.5  # of the calibration rows: data sets repeat some rows by themselves, wine one in five


class SeenRowsWarning(UserWarning):
    """Most of the calibration rows were given to `fit`, which costs the guarantee of coverage."""


def row_marks(rows: Rows) -> Tensor:
    """A number for each row's inputs and targets, the same for rows that agree in every bit: int64 (N,), on the CPU."""
    assert rows.y is not None
    size = rows_within(_CHUNK, 16 * max(1, rows.x[:1].numel()), at_most=len(rows.x))
    # Into one tensor: small ones would settle where the rows of a chunk were, and memory grow by a chunk each.
    marks = torch.empty(len(rows.x), dtype=torch.int64)
    for start in range(0, len(rows.x), size):
        where = slice(start, min(start + size, len(rows.x)))
        marks[where] = (_marks(rows.x[where], seed=0) + _marks(rows.y[where], seed=1)).cpu()
    return marks


def warn_if_seen(known: Tensor, rows: Rows) -> None:
    """Warn if most of the calibration rows are among those with these marks."""
    seen = int(torch.isin(row_marks(rows), known).sum())
    if seen > _MANY * len(rows.x):
        warn(
            f"X: {seen} of {len(rows.x)} calibration rows were given to fit, too. Residuals of rows that the network "
            "was trained on are too small, and intervals too narrow: calibrate on rows it has not seen",
            SeenRowsWarning,
        )


def _marks(values: Tensor, seed: int) -> Tensor:
    """Sums of bits, read as whole numbers, times odd ones drawn once; whole numbers overflow without rounding."""
    flat = values.reshape(len(values), -1).contiguous()
    bits = flat.view(_WHOLE_NUMBERS[flat.element_size()])
    factors = torch.randint(2**62, (bits.shape[1],), generator=torch.Generator().manual_seed(seed))
    return (bits.long() * (2 * factors + 1).to(bits.device)).sum(1)
