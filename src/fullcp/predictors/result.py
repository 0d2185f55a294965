"""What predict_interval returns."""

from __future__ import annotations

from typing import Any, NamedTuple


class PredictionIntervals(NamedTuple):
    """Point predictions and intervals, NumPy or torch as the inputs were; float64.

    Attributes
    ----------
    prediction : (n,), or (n, O) with several outputs
    intervals : (n, 2, levels), or (n, 2, levels, O)
        Lower and upper ends, one column a confidence level.
    """

    prediction: Any
    intervals: Any

    @property
    def lower(self) -> Any:
        """Lower ends, (n, levels) or (n, levels, O)."""
        return self.intervals[:, 0]

    @property
    def upper(self) -> Any:
        """Upper ends, (n, levels) or (n, levels, O)."""
        return self.intervals[:, 1]
