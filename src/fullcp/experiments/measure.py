"""What is written down about a method on a test set: a line a level."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from fullcp.evaluation import coverage, infinite_share, interval_score, widths
from fullcp.experiments.protocol import LEVELS
from fullcp.predictors.base import Predictor

COLUMNS = (
    "fold",
    "repeat",
    "method",
    "level",
    "rows",
    "test_rows",
    "width",
    "coverage",
    "infinite",
    "score",
    "seconds",
    "device",
    "commit",
)
Line = dict[str, object]


def measure(make: Callable[[], Predictor], X: Any, y: Any, *, scale: float = 1.0) -> list[Line]:
    """Make a predictor, ask it for intervals of the test rows X (n, I), and hold them against the labels y (n,).

    Parameters
    ----------
    scale : the unit of y in the target's own units; widths are in these.
    """
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # infinite intervals and the like are counted
        predictor = make()
        result = predictor.predict_interval(X, LEVELS)
    seconds = time.perf_counter() - start
    lines: list[Line] = []
    for j, level in enumerate(LEVELS):
        interval = np.asarray(result.intervals)[:, :, j]
        lines.append(
            {
                "level": level,
                "rows": predictor.n_rows_,
                "test_rows": len(y),
                "width": repr(float(np.mean(widths(interval))) * scale),
                "coverage": repr(coverage(y, interval)),
                "infinite": repr(infinite_share(interval)),
                "score": repr(interval_score(y, interval, level) * scale),
                "seconds": f"{seconds:.4f}",
            }
        )
    return lines
