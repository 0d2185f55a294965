"""SCP: split conformal prediction."""

from __future__ import annotations

from fractions import Fraction
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Self

from fullcp.curvature import points_within
from fullcp.features import Network
from fullcp.influence import RESIDUALS
from fullcp.inputs import Rows, check_all_finite, check_choice
from fullcp.joint import JointScores, split_scores
from fullcp.predictors.base import DEFAULT_MEMORY, Batch, Predictor
from fullcp.predictors.units import warn_if_poor
from fullcp.regions import rows_needed, split_half_widths, split_p_values, split_signed_intervals


class SplitConformalRegressor(Predictor):
    """Split conformal prediction: intervals of one width, from residuals on rows the network has not seen.

    Parameters
    ----------
    model : torch.nn.Module
        The trained network, (n, ...) -> (n,) or (n, O). It is never changed.
    residuals : "absolute" or "signed"
        Signed residuals give the two ends their own quantiles.
    memory : str or int
        Working memory, such as "2GB".

    Attributes
    ----------
    n_rows_ : number of calibration rows.

    Examples
    --------
    >>> import torch, fullcp
    >>> _ = torch.manual_seed(0)
    >>> X_cal, y_cal = torch.randn(50, 3), torch.randn(50)
    >>> cp = fullcp.SplitConformalRegressor(torch.nn.Linear(3, 1)).conformalize(X_cal, y_cal)
    >>> cp.predict_interval(X_cal[:2], confidence_level=[0.8, 0.9]).intervals.shape
    torch.Size([2, 2, 2])
    """

    _trainable: ClassVar[bool] = False

    def __init__(self, model: nn.Module, residuals: str = "absolute", *, memory: str | int = DEFAULT_MEMORY):
        self.model = model
        self.residuals = residuals
        self.memory = memory

    def conformalize(self, X: object, y: object = None) -> Self:
        """Compute residuals on calibration rows.

        Parameters
        ----------
        X : array, tensor or frame (N, ...), or a DataLoader of (inputs, targets)
            Rows that the network has not seen.
        y : (N,) or (N, O); left out with a DataLoader
        """
        check_choice("residuals", self.residuals, RESIDUALS)
        rows = self._read_data(X, y)
        self._calibrate(Network(self.model, rows.x), rows)
        return self

    def _calibrate(self, network: Network, rows: Rows) -> None:
        """Residuals e (N, O) and normalisers (N, O) of the calibration rows."""
        y = self._check_targets(network, rows)
        parts = []
        size = points_within(self._curvature(), network, self._budget() // 8)
        for start in range(0, len(rows.x), size):
            x = rows.x[start : start + size]
            f, normaliser = self._evaluate(network, x, start)
            parts.append((y[start : start + size] - f, normaliser))
        e, normaliser = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        warn_if_poor(e, y)
        self._e, self._normaliser = e, normaliser
        self._residuals = self.residuals
        self._keep(network, len(rows.x), rows.columns)

    def _evaluate(self, network: Network, x: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Predictions and normalisers of calibration rows, the first of them number `start`: float64 (n, O)."""
        f = network.predict(x).double()
        check_all_finite(start, {"outputs": f})
        return f, torch.ones_like(f)

    def _needs_gradients(self) -> bool:
        return False

    def _normaliser_at(self, batch: Batch) -> Tensor:
        """Normalisers of test points, (m, O)."""
        return torch.ones_like(batch.f)

    def _offsets(self, batch: Batch, levels: list[Fraction]) -> Tensor:
        at = self._normaliser_at(batch)
        outputs = []
        for e, n, to in zip(self._e.T, self._normaliser.T, at.T, strict=True):
            if self._residuals == "signed":
                outputs.append(split_signed_intervals(e, n, to, levels))
            else:
                half = split_half_widths(e, n, to, levels)
                outputs.append(torch.stack([-half, half], dim=1))
        return torch.stack(outputs, dim=3)

    def _p_values(self, batch: Batch, y: Tensor) -> Tensor:
        at = self._normaliser_at(batch)
        columns = zip(self._e.T, self._normaliser.T, batch.f.T, y.T, at.T, strict=True)
        return torch.stack([split_p_values(e, n, f, yo, to, self._residuals) for e, n, f, yo, to in columns], dim=1)

    def _check_rectangles(self) -> None:
        """Residuals of split methods can be ranked whatever the network."""

    def _joint_scores(self, batch: Batch, scales: Tensor) -> JointScores:
        return split_scores(self._e, self._normaliser, self._normaliser_at(batch), scales)

    def _rows_needed(self, level: Fraction) -> int:
        return rows_needed(level, self._residuals)

    def _state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return {"e": self._e, "normaliser": self._normaliser}, {"residuals": self._residuals}

    def _restore(self, network: dict[str, Any], state: dict[str, Tensor], facts: dict[str, Any]) -> Network:
        self._e, self._normaliser, self._residuals = state["e"], state["normaliser"], facts["residuals"]
        return Network(self.model, facts=network)
