"""Labels in other units than the network was trained in: intervals stay valid and become useless."""

from __future__ import annotations

from torch import Tensor

from fullcp.notices import warn

_WORSE = 2.0  # than the mean label: mean squares of residuals, in variances of the labels
_FEWEST = 10  # rows, of which a variance says something


class PoorFitWarning(UserWarning):
    """The network predicts the labels worse than their mean does."""


def warn_if_poor(e: Tensor, y: Tensor) -> None:
    """Warn where residuals e (N, O) are large beside the spread of the labels y (N, O)."""
    if len(y) < _FEWEST:
        return
    ratio = e.square().mean(0) / y.var(0, correction=0)
    worst = float(ratio.nan_to_num(0.0).amax())
    if worst > _WORSE:
        warn(
            f"the network predicts y worse than the mean of y does (R^2 = {1 - worst:.3g}), so that intervals will be "
            "wide: are X and y in the units that it was trained in?",
            PoorFitWarning,
        )
