"""ACP-GN (split + refine): full conformal prediction with guaranteed coverage."""

from __future__ import annotations

from typing import Any

from torch import nn
from typing_extensions import Self

from fullcp.predictors.base import DEFAULT_MEMORY
from fullcp.predictors.full import FullConformalRegressor


class RefinedSplitConformalRegressor(FullConformalRegressor):
    """Full conformal ridge regression on the features of a network that never saw the calibration rows.

    The network gives features (its gradients), the calibration rows everything else: curvature, refinement,
    residuals, leverages. All rows and the test point are treated alike, so that the intervals cover the truth with
    at least the chosen probability whenever calibration rows and test points are exchangeable.

    The guarantee is lost if the calibration rows had a part in training the network, in choosing among networks, or
    in tuning `l2`. It is for one output. With several that share parameters, intervals are the paper's quantiles of
    vector changepoints, output by output, which is no conformal set: coverage is close to the level, not guaranteed.

    Parameters
    ----------
    model, curvature, score, residuals, l2, parameters, memory
        As for `FullConformalRegressor`; `l2` penalises the weights refitted on the calibration rows. It is 1 unless
        given: "marglik" would tune it on these rows, as the paper does, which costs the guarantee (though little
        coverage). Tune it on training rows instead, with `FullConformalRegressor(...).conformalize(...).tuning_.l2`.

    Examples
    --------
    >>> import torch, fullcp
    >>> _ = torch.manual_seed(0)
    >>> X_cal = torch.randn(60, 3)
    >>> y_cal = X_cal.sum(1) + 0.1 * torch.randn(60)
    >>> net = torch.nn.Linear(3, 1)
    >>> cp = fullcp.RefinedSplitConformalRegressor(net, l2=0.1).conformalize(X_cal, y_cal)
    >>> cp.predict_interval(X_cal[:2]).intervals.shape
    torch.Size([2, 2, 1])
    """

    def __init__(
        self,
        model: nn.Module,
        curvature: str = "auto",
        score: str = "auto",
        residuals: str = "auto",
        l2: Any = 1.0,
        *,
        parameters: Any = None,
        memory: str | int = DEFAULT_MEMORY,
    ):
        self.model = model
        self.curvature = curvature
        self.score = score
        self.residuals = residuals
        self.l2 = l2
        self.parameters = parameters
        self.memory = memory

    def conformalize(self, X: object, y: object = None) -> Self:
        """Refit the linearised network on calibration rows and compute all that intervals need.

        Parameters
        ----------
        X : array, tensor or frame (N, ...), or a DataLoader of (inputs, targets)
            Rows that the network has not seen.
        y : (N,) or (N, O); left out with a DataLoader
        """
        return super().conformalize(X, y)

    def _is_refined(self) -> bool:
        return True
