"""ACP: full conformal prediction over a grid of labels, by one influence step in the weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from fullcp.candidates import count_tails, grid_over
from fullcp.curvature import STRUCTURES, Curvature, fit_curvature, jacobian_for, restore
from fullcp.features import FeatureRows, Jacobian, Network, PerturbedNetwork
from fullcp.influence import RESIDUALS
from fullcp.inputs import check_all_finite, check_choice
from fullcp.memory import rows_within
from fullcp.predictors.base import DEFAULT_MEMORY, Batch
from fullcp.predictors.candidate import CandidatePredictor
from fullcp.tuning import settle, tuning_facts, tuning_from

_MOST_POINTS = 32  # test points at once: more win nothing and make progress jerky


class GridFullConformalRegressor(CandidatePredictor):
    """Full conformal prediction over a grid of labels, where influence functions stand in for retraining (ACP).

    For a test point x and each candidate label y, the weights after training on (x, y) too are approximated by

        theta(y) = theta_* + (y - f(x)) H^-1 phi(x),   H = sum_i phi_i phi_i^T + diag(l2) over the training rows,

    and all N + 1 residuals are those of the network at theta(y). The scores are plain residuals. It is a baseline for
    `FullConformalRegressor`, which linearises the network too, and needs no grid. Coverage is not guaranteed. For one
    output.

    The step is the classical one of influence functions (Martinez et al., 2023): H does not know the new point, whose
    leverage is h = phi^T H^-1 phi. To first order its residual becomes (1 - h)(y - f) where retraining gives
    (y - f) / (1 + h), so that sets are wide where h comes near to 1. Their "direct approach", which the paper names,
    goes without theta(y) and linearises the scores; where leverages are small, the sets are the same.

    Parameters
    ----------
    model : torch.nn.Module
        The trained network, (n, ...) -> (n,) or (n, 1). It is never changed.
    curvature : "auto", "full", "kfac", "last_layer" or "diagonal"
        The structure of the Gauss-Newton matrix, see `FullConformalRegressor`.
    residuals : "absolute" or "signed"
    l2 : "marglik", float, or array of one value per parameter tensor or per parameter
        The ridge penalty in sum scale, see `FullConformalRegressor`.
    candidates : int or array (K,)
        How many labels to try, evenly spaced over the range of the training targets, or the labels themselves.
        Intervals end at candidates: see `predict_interval`.
    memory : str or int
        Working memory, such as "2GB".

    Attributes
    ----------
    grid_ : the candidate labels, a float64 tensor.
    curvature_ : the fitted curvature.
    n_rows_ : number of training rows.
    tuning_ : the tuned l2 and noise; None where l2 was given.

    Examples
    --------
    >>> import torch, fullcp
    >>> _ = torch.manual_seed(0)
    >>> X = torch.randn(100, 3)
    >>> y = X.sum(1) + 0.1 * torch.randn(100)
    >>> net = torch.nn.Linear(3, 1)
    >>> with torch.no_grad():
    ...     _ = net.weight.fill_(1.0), net.bias.zero_()
    >>> cp = fullcp.GridFullConformalRegressor(net).conformalize(X, y)
    >>> cp.predict_interval(X[:5], confidence_level=[0.9, 0.95]).intervals.shape
    torch.Size([5, 2, 2])
    """

    def __init__(
        self,
        model: nn.Module,
        curvature: str = "auto",
        residuals: str = "absolute",
        l2: Any = "marglik",
        *,
        candidates: Any = 200,
        memory: str | int = DEFAULT_MEMORY,
    ):
        self.model = model
        self.curvature = curvature
        self.residuals = residuals
        self.l2 = l2
        self.candidates = candidates
        self.memory = memory

    def conformalize(self, X: object, y: object = None) -> Self:
        """Compute the curvature on the rows the network was trained on, and lay the grid over their targets.

        Parameters
        ----------
        X : array, tensor or frame (N, ...), or a DataLoader of (inputs, targets)
        y : (N,) or (N, 1); left out with a DataLoader
        """
        check_choice("curvature", self.curvature, STRUCTURES)
        check_choice("residuals", self.residuals, RESIDUALS)
        rows = self._read_data(X, y)
        assert rows.y is not None
        grid = grid_over(self.candidates, rows.y.flatten())
        jacobian = jacobian_for(self.curvature, self.model, rows.x)
        if jacobian.outputs > 1:
            raise ValueError(f"model has {jacobian.outputs} outputs: candidates form a grid over one label only")
        targets = self._check_targets(jacobian, rows)
        features = FeatureRows(jacobian, rows.x, memory=self._budget())
        l2, tuning = settle(self.l2, features, targets - features.predictions, self.curvature)
        curvature = fit_curvature(features, self.curvature, l2, cross=False)
        self._assemble(features, curvature, targets[:, 0], grid, self.residuals)
        self.tuning_ = tuning
        self._keep(jacobian, len(rows.x), rows.columns)
        return self

    def _assemble(self, features: FeatureRows, curvature: Curvature, y: Tensor, grid: Tensor, residuals: str) -> None:
        self._perturbed = PerturbedNetwork(features.jacobian, features.x)
        self.curvature_, self.grid_ = curvature, grid
        self._features, self._y, self._residuals = features, y, residuals

    def _tails(self, batch: Batch, labels: Tensor) -> Tensor:
        assert batch.phi is not None
        m, K = labels.shape
        phi = batch.phi[:, 0].double()
        v = self.curvature_.solve(phi.T).T.contiguous()  # H^-1 phi, (m, D)
        check_all_finite(None, {"leverages": (phi * v).sum(1, keepdim=True)})
        y, r = labels.flatten(), (labels - batch.f).flatten()
        which = torch.arange(m, device=y.device).repeat_interleave(K)
        size = self._perturbed.sets_at_once(self._budget() // 4, self._rows_at_once())
        parts = [
            self._tails_at(self._perturbed.weights(v, which[at], r[at]), batch.x[which[at]], y[at])
            for at in (slice(start, start + size) for start in range(0, m * K, size))
        ]
        return torch.cat(parts, dim=1).view(-1, m, K)

    def _tails_at(self, weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        """Tails (T, P) for P sets of weights, each made for its new row x_p and label y_p."""
        new = y - self._perturbed.own(weights, x)
        size, N = self._rows_at_once(), len(self._y)
        chunks = [slice(start, start + size) for start in range(0, N, size)]
        tails = [
            count_tails(self._y[rows] - self._perturbed(weights, self._features.x[rows]), new, self._residuals)
            for rows in chunks
        ]
        return torch.stack(tails).sum(0)

    def _rows_at_once(self) -> int:
        return self._perturbed.rows_at_once(self._budget() // 4, len(self._y))

    def _points_at_once(self) -> int:
        K, D = len(self.grid_), self.network_.size  # type: ignore[attr-defined]
        points = rows_within(self._budget() // 8, 8 * (8 * K + 4 * D), at_most=_MOST_POINTS)
        return min(points, super()._points_at_once())

    def _state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        state = {"x": self._features.x, "y": self._y, "grid": self.grid_, **self.curvature_.state()}
        return state, {"residuals": self._residuals, "tuning": tuning_facts(self.tuning_)}

    def _restore(self, network: dict[str, Any], state: dict[str, Tensor], facts: dict[str, Any]) -> Network:
        jacobian = Jacobian(self.model, facts=network)
        features = FeatureRows(jacobian, state["x"], memory=self._budget())
        curvature = restore(features, state)
        self._assemble(features, curvature, state["y"], state["grid"], facts["residuals"])
        self.tuning_ = tuning_from(facts["tuning"])
        return jacobian
