"""Random splits of rows, reproducible from a seed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]


def random_splits(rows: int, repeats: int, *, test_share: float = 0.1, seed: int = 0) -> Iterator[tuple[Rows, Rows]]:
    """Training and test rows of several random splits; split i depends on the seed and i alone.

    Examples
    --------
    >>> [(len(train), len(test)) for train, test in random_splits(442, 2)]
    [(398, 44), (398, 44)]
    """
    if not 0 < test_share < 1:
        raise ValueError(f"test_share must lie between 0 and 1, got {test_share}")
    for i in range(repeats):
        order = np.random.default_rng([seed, i]).permutation(rows)
        test = max(1, round(rows * test_share))
        yield order[test:], order[:test]


def cross_validation(rows: int, folds: int = 10, repeat: int = 0, *, seed: int = 0) -> Iterator[tuple[Rows, Rows]]:
    """Training and test rows of the folds of one repeat; each row is tested once, training rows come in random order.

    Examples
    --------
    >>> [(len(train), len(test)) for train, test in cross_validation(10, 3)]
    [(6, 4), (7, 3), (7, 3)]
    """
    if not 2 <= folds <= rows:
        raise ValueError(f"folds must lie between 2 and the number of rows, {rows}, got {folds}")
    parts = np.array_split(np.random.default_rng([seed, repeat]).permutation(rows), folds)
    for i, test in enumerate(parts):
        others = np.concatenate([part for j, part in enumerate(parts) if j != i])
        yield np.random.default_rng([seed, repeat, i]).permutation(others), test


def halves(rows: Rows, *, share: float = 0.5) -> tuple[Rows, Rows]:
    """The first part for training, the last `share` for calibration (the rows are shuffled already)."""
    if not 0 < share < 1:
        raise ValueError(f"share must lie between 0 and 1, got {share}")
    cut = len(rows) - round(len(rows) * share)
    return rows[:cut], rows[cut:]
