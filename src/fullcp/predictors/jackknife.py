"""Jackknife+ from one fit."""

from __future__ import annotations

import warnings
from fractions import Fraction
from typing import Any

from torch import Tensor, nn
from typing_extensions import Self

from fullcp.curvature import Curvature, check_structure, fit_curvature, linear_change, restore
from fullcp.features import FeatureRows, Jacobian, Network
from fullcp.leave_one_out import LeaveOneOut
from fullcp.predictors.base import DEFAULT_MEMORY, Batch, Predictor
from fullcp.predictors.full import MissingScoreWarning, warn_if_far
from fullcp.predictors.linearised import LinearisedNetwork
from fullcp.refinement import refine, relative_shift
from fullcp.regions import rows_needed
from fullcp.sources import as_tensor
from fullcp.tuning import tuning_facts, tuning_from


class PlusPredictor(Predictor):
    """What jackknife+ and CV+ share: levels from one half on, and the ranks of their order statistics."""

    def _joint_levels(self, levels: list[Fraction], joint: str | None) -> list[Fraction]:
        low = [level for level in levels if level < Fraction(1, 2)]
        if low:
            raise ValueError(
                f"confidence_level must be at least 0.5 for {type(self).__name__}, got {float(low[0]):.6g}: below, its "
                "intervals can be empty"
            )
        return super()._joint_levels(levels, joint)

    def _rows_needed(self, level: Fraction) -> int:
        return rows_needed(level, "absolute")

    def _check_rectangles(self) -> None:
        """Every row's model has residuals of its own, which can be ranked whatever the network."""


class JackknifePlusRegressor(PlusPredictor):
    """Jackknife+ for a trained network, from one fit: every leave-one-out model by one Gauss-Newton step.

    Jackknife+ trains a model without each of the N rows, and covers with probability 1 - 2 alpha at least (in practice
    close to 1 - alpha). Here no network is trained: residuals, predictions and leverages of the model without row i
    follow from the leverages of the one that is there. For a linear model with a fixed penalty they are exact, and with
    them the guarantee. For a network nothing is guaranteed, since none is trained again, and coverage is in practice as
    close to the level as that of `FullConformalRegressor`. Where it must hold, see `InformedSplitConformalRegressor`.

    Normalised, for one output and exact curvature, the ends are the very numbers of `FullConformalRegressor` with
    studentized absolute residuals: a row's end f - c_i q_i + sqrt(1 + h + c_i^2 / (1 - h_i)) sqrt(1 - h_i) |q_i| is its
    changepoint. It is the other way to the same interval; `normalized=False` and several outputs differ.

    Several outputs are intervals one by one: no model without a row depends on the label asked about, so that nothing
    couples them. With `joint="max"` they hold at once, under the same conditions and with the same probability.

    Parameters
    ----------
    model : torch.nn.Module
        The trained network, (n, ...) -> (n,) or (n, O). It is never changed.
    curvature : "auto", "full", "kfac", "last_layer", "diagonal", "low_rank" or "low_rank:200"
        See `FullConformalRegressor`.
    normalized : bool
        Divide residuals by sqrt(1 + h), with the leverage h of the model without the row: intervals widen where the
        training rows say little. Without it, widths are nearly the same everywhere.
    l2 : "marglik", "leave_one_out", float, or array of one value per parameter tensor or per parameter
        The ridge penalty in sum scale, see `FullConformalRegressor`.
    refine : bool
        Move predictions and residuals to the ridge solution of the linearised network, about which the formulas are.
    parameters : None, str, sequence of str, or callable
        Which parameters count, of those with requires_grad; see `FullConformalRegressor`.
    memory : str or int
        Working memory, such as "2GB". The factor of the curvature comes on top.

    Attributes
    ----------
    curvature_, curvature_choice_, tuning_, shift_ : as of `FullConformalRegressor`.
    leave_one_out_residuals_ : q_i (N,) or (N, O), as NumPy.
    n_rows_ : number of training rows.

    Notes
    -----
    An interval need not hold the prediction, and levels below 0.5 are refused: their intervals can be empty.

    Examples
    --------
    >>> import torch, fullcp
    >>> _ = torch.manual_seed(0)
    >>> X = torch.randn(100, 3)
    >>> y = X.sum(1) + 0.1 * torch.randn(100)
    >>> cp = fullcp.JackknifePlusRegressor(torch.nn.Linear(3, 1), l2=0.1, refine=True).conformalize(X, y)
    >>> cp.predict_interval(X[:5], confidence_level=[0.9, 0.95]).intervals.shape
    torch.Size([5, 2, 2])
    """

    def __init__(
        self,
        model: nn.Module,
        curvature: str = "auto",
        normalized: bool = True,
        l2: Any = "marglik",
        *,
        refine: bool = False,
        parameters: Any = None,
        memory: str | int = DEFAULT_MEMORY,
    ):
        self.model = model
        self.curvature = curvature
        self.normalized = normalized
        self.l2 = l2
        self.refine = refine
        self.parameters = parameters
        self.memory = memory

    def conformalize(self, X: object, y: object = None) -> Self:
        """Compute curvature, leverages and residuals on the rows the network was trained on.

        Parameters
        ----------
        X : array, tensor or frame (N, ...), or a DataLoader of (inputs, targets)
        y : (N,) or (N, O); left out with a DataLoader
        """
        check_structure(self.curvature)
        for name in ("normalized", "refine"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")
        rows = self._read_data(X, y)
        known = LinearisedNetwork.about(self.model, rows, self.curvature, self.l2, self._budget(), self.parameters)
        curvature = fit_curvature(known.features, known.structure, known.l2)
        step, refined = refine(curvature, known.jacobian, known.e, exactly=self.refine)
        slack = curvature.slack()
        shift = relative_shift(known.e, refined)
        e = refined if self.refine else known.e
        self._assemble(curvature, known.features, e, slack, step if self.refine else None, self.normalized)
        self.curvature_choice_, self.tuning_, self.shift_ = known.why, known.tuning, shift
        self._keep(known.jacobian, len(rows.x), rows.columns)
        self._warn_of_missing_models(known.structure)
        if not self.refine:
            warn_if_far(shift)
        return self

    @property
    def leave_one_out_residuals_(self) -> Any:
        """q_i (N,) or (N, O), as NumPy; nan where there is no model without the row."""
        self._check_fitted()
        q = self._engine.q.masked_fill(self._engine.missing.unsqueeze(1), float("nan"))
        return (q[:, 0] if q.shape[1] == 1 else q).cpu().numpy()

    def _assemble(
        self,
        curvature: Curvature,
        features: FeatureRows,
        e: Tensor,
        slack: Tensor,
        step: Tensor | None,
        normalized: bool,
    ) -> None:
        self.curvature_ = curvature
        self._features, self._step = features, step
        self._engine = LeaveOneOut(curvature, features, e, slack, normalized=normalized, memory=self._budget())

    def _warn_of_missing_models(self, structure: str) -> None:
        share = float(self._engine.missing.double().mean())
        if share > 0:
            warnings.warn(
                f"{share:.1%} of the training rows have a leverage of 1 or more by curvature={structure!r}, where "
                "there is no model without the row: they count for every label, which widens intervals. Use "
                "curvature='full' or 'last_layer'",
                MissingScoreWarning,
                stacklevel=3,
            )

    def _points_at_once(self) -> int:
        return self._engine.points

    def _centers_need_gradients(self) -> bool:
        return self._step is not None

    def _center(self, f: Tensor, phi: Tensor | None) -> Tensor:
        return f if self._step is None or phi is None else f + linear_change(self.curvature_, phi, self._step)

    def _offsets(self, batch: Batch, levels: list[Fraction]) -> Tensor:
        assert batch.phi is not None
        return self._engine.intervals(batch.phi, levels)

    def _p_values(self, batch: Batch, y: Tensor) -> Tensor:
        assert batch.phi is not None
        return self._engine.p_values(batch.phi, batch.f, y)

    def _rectangles(self, batch: Batch, levels: list[Fraction], scales: Tensor) -> Tensor:
        assert batch.phi is not None
        return self._engine.intervals(batch.phi, levels, scales)

    def _rectangle_p_values(self, batch: Batch, y: Tensor, scales: Tensor) -> Tensor:
        assert batch.phi is not None
        return self._engine.p_values(batch.phi, batch.f, y, scales).amin(1, keepdim=True)

    def _state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        engine = self._engine
        state = {"x": as_tensor(self._features.x), "e": engine.e, "slack": engine.slack, **self.curvature_.state()}
        if self._step is not None:
            state["step"] = self._step
        facts = {"normalized": engine.normalized, "choice": self.curvature_choice_}
        return state, {**facts, "shift": self.shift_, "tuning": tuning_facts(self.tuning_)}

    def _restore(self, network: dict[str, Any], state: dict[str, Tensor], facts: dict[str, Any]) -> Network:
        jacobian = Jacobian(self.model, facts=network)
        features = FeatureRows(jacobian, state["x"], memory=self._budget())
        curvature = restore(features, state)
        self._assemble(curvature, features, state["e"], state["slack"], state.get("step"), facts["normalized"])
        self.curvature_choice_, self.shift_ = facts["choice"], facts["shift"]
        self.tuning_ = tuning_from(facts["tuning"])
        return jacobian


__all__ = ["JackknifePlusRegressor", "PlusPredictor"]
