"""What predict_interval returns."""

from __future__ import annotations

from typing import Any, NamedTuple


class _Pair(NamedTuple):
    prediction: Any
    intervals: Any


class PredictionIntervals(_Pair):
    """Point predictions and intervals, a named pair; NumPy or torch as the inputs were, float64.

    Attributes
    ----------
    prediction : (n,), or (n, O) with several outputs
    intervals : (n, 2, levels), or (n, 2, levels, O)
        Lower and upper ends, one column a confidence level.
    levels : tuple of float
        The confidence levels, in the order of the columns.
    """

    levels: tuple[float, ...]

    def __new__(cls, prediction: Any, intervals: Any, levels: tuple[float, ...] = ()) -> PredictionIntervals:
        """A pair that knows its levels."""
        pair = super().__new__(cls, prediction, intervals)
        pair.levels = tuple(levels)
        return pair

    def __getnewargs__(self) -> tuple[Any, Any, tuple[float, ...]]:
        """For copies and pickles."""
        return self.prediction, self.intervals, self.levels

    @property
    def lower(self) -> Any:
        """Lower ends, (n, levels) or (n, levels, O)."""
        return self.intervals[:, 0]

    @property
    def upper(self) -> Any:
        """Upper ends, (n, levels) or (n, levels, O)."""
        return self.intervals[:, 1]
