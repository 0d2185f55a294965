"""ACP: full conformal prediction over a grid of labels, by influence functions on residuals or on weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from fullcp.candidates import count_intervals, count_tails, grid_over
from fullcp.curvature import Curvature, KernelCurvature, check_structure, choose, fit_curvature, restore
from fullcp.features import FeatureRows, Jacobian, Network, PerturbedNetwork, select_parameters
from fullcp.influence import RESIDUALS, direct_changepoints
from fullcp.inputs import check_all_finite, check_choice
from fullcp.memory import rows_within
from fullcp.predictors.base import DEFAULT_MEMORY, Batch
from fullcp.predictors.candidate import CandidatePredictor
from fullcp.sources import as_tensor
from fullcp.tuning import settle, tuning_facts, tuning_from

_MOST_POINTS = 32  # test points at once: more win nothing and make progress jerky


class _Direct:
    """The residuals to first order in the weights, from cross leverages alone; `values` are the residuals e (N,)."""

    kept = "e"

    def __init__(self, features: FeatureRows, curvature: Curvature, values: Tensor, residuals: str):
        self.features, self.curvature, self.values, self.residuals = features, curvature, values, residuals

    def tails(self, batch: Batch, labels: Tensor, budget: int) -> Tensor:
        """Tails (T, m, K) of the labels (m, K), in order along each row."""
        assert batch.phi is not None
        query, r = self.curvature.query(batch.phi), labels - batch.f
        check_all_finite(None, {"leverages": query.leverage})
        tails = torch.zeros(1 if self.residuals == "absolute" else 2, *r.shape, dtype=torch.long, device=r.device)
        for rows in self.features.slices():
            c, h = query.cross(rows)[..., 0, 0].contiguous(), query.leverage[:, 0, 0]
            ends = direct_changepoints(self.residuals, self.values[rows], c, h)
            for tail, (left, right) in zip(tails, ends, strict=True):
                tail += count_intervals(left, right, r)
        return tails

    def points_at_once(self, candidates: int, budget: int) -> int:
        """How many test points to take at a time."""
        N = len(self.values)
        in_flight = 12 * 8 * min(self.features.chunk, N)  # the arrays of one chunk of training rows
        per_point = in_flight + 8 * (2 * N + 8 * candidates)
        return rows_within(budget // 4, per_point, at_most=4096)


class _Indirect:
    """The residuals of the network at its weights for each label; `values` are the targets y (N,)."""

    kept = "y"

    def __init__(self, features: FeatureRows, curvature: Curvature, values: Tensor, residuals: str):
        self.features, self.curvature, self.values, self.residuals = features, curvature, values, residuals
        self.perturbed = PerturbedNetwork(features.jacobian, features.x)

    def tails(self, batch: Batch, labels: Tensor, budget: int) -> Tensor:
        """Tails (T, m, K) of the labels (m, K)."""
        m, K = labels.shape
        phi = self._gradients(batch)
        v = self.curvature.solve(phi.T).T.contiguous()  # H^-1 phi, (m, D)
        check_all_finite(None, {"leverages": (phi * v).sum(1, keepdim=True)})
        y, r = labels.flatten(), (labels - batch.f).flatten()
        which = torch.arange(m, device=y.device).repeat_interleave(K)
        rows = self.perturbed.rows_at_once(budget // 4, len(self.values))
        size = self.perturbed.sets_at_once(budget // 4, rows)
        parts = [
            self._tails_at(self.perturbed.weights(v, which[at], r[at]), batch.x[which[at]], y[at], rows)
            for at in (slice(start, start + size) for start in range(0, m * K, size))
        ]
        return torch.cat(parts, dim=1).view(-1, m, K)

    def points_at_once(self, candidates: int, budget: int) -> int:
        """How many test points to take at a time."""
        per_point = 8 * (8 * candidates + 4 * self.features.size)
        return rows_within(budget // 8, per_point, at_most=_MOST_POINTS)

    def _gradients(self, batch: Batch) -> Tensor:
        """Phi, (m, D): here nothing less will do, since weights move along H^-1 phi."""
        assert batch.phi is not None
        given = not isinstance(self.curvature, KernelCurvature)
        return (batch.phi if given else self.features.jacobian(batch.x)[1])[:, 0].double()

    def _tails_at(self, weights: dict[str, Tensor], x: Tensor, y: Tensor, size: int) -> Tensor:
        """Tails (T, P) for P sets of weights, each made for its new row x_p and label y_p."""
        new = y - self.perturbed.own(weights, x)
        tails = [
            count_tails(self.values[rows] - self.perturbed(weights, self.features.x[rows]), new, self.residuals)
            for rows in (slice(start, start + size) for start in range(0, len(self.values), size))
        ]
        return torch.stack(tails).sum(0)


_WAYS: dict[str, type[_Direct] | type[_Indirect]] = {"direct": _Direct, "indirect": _Indirect}


class GridFullConformalRegressor(CandidatePredictor):
    """Full conformal prediction over a grid of labels, where influence functions stand in for retraining (ACP).

    For a test point x and each candidate label y, training on (x, y) too is taken to move the weights by

        (y - f(x)) H^-1 phi(x),   H = sum_i phi_i phi_i^T + diag(l2) over the training rows,

    the classical step of influence functions (Martinez et al., 2023): H does not know the new point. It is a baseline
    for `FullConformalRegressor`, which needs no grid. Coverage is not guaranteed. For one output.

    What becomes of the N + 1 residuals, with r = y - f(x), leverage h of x and cross leverages c_i, is a choice:

    - "direct", as in the paper: they are linear in the step, e_i - c_i r, and (1 - h) r for x. No network is run
      again, and all candidates cost little more than one.
    - "indirect": they are those of the network at the moved weights. Far labels move these far, where the network
      may do anything: sets can have pieces far out, which make intervals very wide.

    For a network that is linear in its weights the two are the same, for others they are close where steps are short.
    Retraining a linear network gives r / (1 + h) where these have (1 - h) r: sets are too wide where h comes near to
    1, may fill the grid there, and mean little beyond.

    Parameters
    ----------
    model : torch.nn.Module
        The trained network, (n, ...) -> (n,) or (n, 1). It is never changed.
    curvature : "auto", "full", "kfac", "last_layer", "diagonal", "low_rank" or "low_rank:200"
        The structure of the Gauss-Newton matrix, see `FullConformalRegressor`.
    residuals : "absolute" or "signed"
    l2 : "marglik", float, or array of one value per parameter tensor or per parameter
        The ridge penalty in sum scale, see `FullConformalRegressor`.
    approach : "direct" or "indirect"
        Whether residuals are linearised or the network runs at new weights, see above.
    candidates : int or array (K,)
        How many labels to try, evenly spaced over the range of the training targets, or the labels themselves.
        Intervals end at candidates: see `predict_interval`.
    parameters : None, str, sequence of str, or callable
        Which parameters count, of those with requires_grad; see `FullConformalRegressor`.
    memory : str or int
        Working memory, such as "2GB".

    Attributes
    ----------
    grid_ : the candidate labels, a float64 tensor.
    curvature_choice_ : what curvature="auto" came to and why, in words.
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
        approach: str = "direct",
        candidates: Any = 200,
        parameters: Any = None,
        memory: str | int = DEFAULT_MEMORY,
    ):
        self.model = model
        self.curvature = curvature
        self.residuals = residuals
        self.l2 = l2
        self.approach = approach
        self.candidates = candidates
        self.parameters = parameters
        self.memory = memory

    def conformalize(self, X: object, y: object = None) -> Self:
        """Compute the curvature on the rows the network was trained on, and lay the grid over their targets.

        Parameters
        ----------
        X : array, tensor or frame (N, ...), or a DataLoader of (inputs, targets)
        y : (N,) or (N, 1); left out with a DataLoader
        """
        check_structure(self.curvature)
        check_choice("residuals", self.residuals, RESIDUALS)
        check_choice("approach", self.approach, tuple(_WAYS))
        rows = self._read_data(X, y)
        assert rows.y is not None
        grid = grid_over(self.candidates, rows.y.flatten())
        only = select_parameters(self.model, self.parameters)
        choice = choose(self.curvature, self.model, rows.x, only=only, memory=self._budget())
        jacobian = choice.jacobian
        if jacobian.outputs > 1:
            raise ValueError(f"model has {jacobian.outputs} outputs: candidates form a grid over one label only")
        targets = self._check_targets(jacobian, rows)
        features = FeatureRows(jacobian, rows.x, memory=self._budget())
        e = targets - features.predictions
        l2, tuning = settle(self.l2, features, e, choice.structure)
        direct = self.approach == "direct"
        curvature = fit_curvature(features, choice.structure, l2, cross=direct)
        self._assemble(features, curvature, (e if direct else targets)[:, 0], grid, self.approach, self.residuals)
        self.tuning_, self.curvature_choice_ = tuning, f"{choice.structure}: {choice.why}"
        self._keep(jacobian, len(rows.x), rows.columns)
        return self

    def _assemble(
        self,
        features: FeatureRows,
        curvature: Curvature,
        values: Tensor,
        grid: Tensor,
        approach: str,
        residuals: str,
    ) -> None:
        self._way = _WAYS[approach](features, curvature, values, residuals)
        self.curvature_, self.grid_ = curvature, grid
        self._features, self._approach, self._residuals = features, approach, residuals

    def _tails(self, batch: Batch, labels: Tensor) -> Tensor:
        return self._way.tails(batch, labels, self._budget())

    def _points_at_once(self) -> int:
        return min(self._way.points_at_once(len(self.grid_), self._budget()), super()._points_at_once())

    def _state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        state = {"x": as_tensor(self._features.x), "grid": self.grid_, self._way.kept: self._way.values}
        facts = {"approach": self._approach, "residuals": self._residuals, "choice": self.curvature_choice_}
        return {**state, **self.curvature_.state()}, {**facts, "tuning": tuning_facts(self.tuning_)}

    def _restore(self, network: dict[str, Any], state: dict[str, Tensor], facts: dict[str, Any]) -> Network:
        jacobian = Jacobian(self.model, facts=network)
        features = FeatureRows(jacobian, state["x"], memory=self._budget())
        curvature = restore(features, state)
        approach = facts["approach"]
        self._assemble(features, curvature, state[_WAYS[approach].kept], state["grid"], approach, facts["residuals"])
        self.tuning_, self.curvature_choice_ = tuning_from(facts["tuning"]), facts["choice"]
        return jacobian
