"""A table of numbers with a target: what all data sets become, and the checks they pass on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_LEAST_ROWS = 10


@dataclass(frozen=True)
class Table:
    """Inputs X (N, I) and targets y (N,) in float64, under the names of their columns."""

    name: str
    X: Array
    y: Array
    columns: tuple[str, ...]
    target: str

    def __len__(self) -> int:
        return len(self.y)


def checked_table(
    name: str, values: Array, columns: Sequence[str], target: str, *, constants: bool = False, first_row: int = 1
) -> Table:
    """Take the target out of a matrix (N, I + 1), or say which column or row is in the way.

    Parameters
    ----------
    columns : names of the I + 1 columns, the target's among them.
    constants : whether input columns without variation may stay.
    first_row : how rows are counted in messages.
    """
    place = list(columns).index(target)
    if values.shape[1] < 2:
        raise ValueError(f"{name} has one column, the target {target!r}: inputs are missing")
    if len(values) < _LEAST_ROWS:
        raise ValueError(f"{name} has {len(values)} row(s), at least {_LEAST_ROWS} are needed")
    bad = ~np.isfinite(values)
    if bad.any():
        row, column = (int(k) for k in np.argwhere(bad)[0])
        what = "a missing value" if np.isnan(values[row, column]) else "an infinite value"
        others = int(bad.any(1).sum()) - 1
        more = f", and {others} more row(s) have such values" if others else ""
        raise ValueError(
            f"{name} has {what} in column {columns[column]!r}, row {row + first_row}{more}: fill them in, or leave out "
            "these rows or columns"
        )
    spread = np.ptp(values, axis=0)
    still = [columns[int(j)] for j in np.flatnonzero(spread == 0) if j == place or not constants]
    if still:
        what = "target" if still[0] == target else "column"
        raise ValueError(f"{name} has the same value in all rows of {what} {still[0]!r}: leave it out")
    kept = [j for j in range(values.shape[1]) if j != place]
    inputs = tuple(columns[j] for j in kept)
    return Table(name, np.ascontiguousarray(values[:, kept]), values[:, place].copy(), inputs, target)
