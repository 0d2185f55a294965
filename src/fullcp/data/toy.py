"""A one-dimensional example with a gap, to look at."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def one_dimensional(rows: int = 60, *, seed: int = 0) -> tuple[Array, Array]:
    """Noisy rows of a smooth curve with nothing between -1 and 1.2: inputs (rows, 1) and targets (rows,)."""
    rng = np.random.default_rng(seed)
    left = rows // 2
    x = np.concatenate([rng.uniform(-3, -1, left), rng.uniform(1.2, 3, rows - left)])
    return x[:, None], np.sin(1.5 * x) + 0.3 * x + rng.normal(scale=0.2, size=rows)
