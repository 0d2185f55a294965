"""ACP-GN: full conformal prediction with Gauss-Newton influence."""

from __future__ import annotations

import warnings
from copy import copy
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from fullcp.curvature import (
    APPROXIMATE,
    Curvature,
    check_structure,
    choose,
    fit_curvature,
    linear_change,
    read_structure,
    restore,
)
from fullcp.engine import Engine
from fullcp.features import FeatureRows, Jacobian, Network, select_parameters
from fullcp.influence import RESIDUALS, SCORES
from fullcp.inputs import check_choice
from fullcp.joint import JointScores, PrunedScores, check_uncoupled, full_scores
from fullcp.predictors.base import DEFAULT_MEMORY, Batch, Predictor
from fullcp.predictors.units import warn_if_poor
from fullcp.refinement import refine, relative_shift
from fullcp.regions import Interval, rows_needed
from fullcp.sources import as_tensor
from fullcp.tuning import settle, tuning_facts, tuning_from

# Absolute residuals give the smaller sets with few rows: signed ones cost a rank at each end.
_MOST_ROWS_FOR_ABSOLUTE = 5000
# Networks trained for long with the l2 they are given lie below 0.1; raw targets, an l2 that is not the one of the
# training, or a stop after a few epochs give 0.7 and more.
_FAR = 0.5


class FarFromMinimumWarning(UserWarning):
    """The network is not near a minimum of the penalised loss with the l2 given."""


class MissingScoreWarning(UserWarning):
    """Approximate curvature gives training rows leverages of 1 and more, where the score asked for does not exist."""


class FullConformalRegressor(Predictor):
    """Full conformal prediction intervals for a trained network, without retraining (ACP-GN).

    A Gauss-Newton influence step tells what training on the test point with any label would do to every residual;
    the prediction set follows in closed form. All the training data serve both the network and the intervals.
    Coverage is not guaranteed (the retraining is approximated), but in practice close to the level; where it must
    hold, see `InformedSplitConformalRegressor`.

    Parameters
    ----------
    model : torch.nn.Module
        The trained network, (n, ...) -> (n,) or (n, O). It is never changed.
    curvature : "auto", "full", "kfac", "last_layer", "diagonal", "low_rank" or "low_rank:200"
        The structure of the Gauss-Newton matrix. "full" is the exact one, in the primal or dual form that is cheaper;
        up to some 20,000 rows it serves networks of millions of parameters.
        "last_layer" is exact for a linear model on what goes into the last nn.Linear layer. "kfac" (nn.Linear and
        nn.Conv2d layers) and "diagonal" are approximations for large networks: leverages of training rows can reach 1
        there, where only the standard score exists. "low_rank" is the full matrix as far as its largest eigenvalues
        go, for many rows and many parameters: `curvature_.error` bounds what leverages lack, and falls to nothing as
        the rank grows, which is chosen within `memory`, or given behind a colon. "auto" is "full" where that fits
        `memory` and takes minutes at the most, else "kfac" if it knows the network's layers, else "low_rank";
        `curvature_choice_` says which and why.
    score : "auto", "studentized", "standard" or "deleted"
        "auto" is "studentized" with exact curvature, "standard" with an approximation (the paper's findings).
    residuals : "auto", "absolute" or "signed"
        "auto" is absolute up to 5,000 training rows, signed beyond and for several outputs.
    l2 : "marglik", "leave_one_out", float, or array of one value per parameter tensor or per parameter
        The ridge penalty in sum scale. "marglik" tunes it (and the noise) by the Laplace marginal likelihood on the
        training rows. If the network was trained with a penalty, that one is as good: for the mean of (y - f)^2 and
        weight decay w on N rows it is N w / 2, for the mean of (y - f)^2 / 2 it is N w. With curvature="last_layer"
        it is about that layer's parameters alone. "marglik" tunes with the curvature that the intervals use.
        "leave_one_out" scales what it finds by the factor from 0.03 to 30 that makes leave-one-out residuals smallest
        (exact curvature only, seven fits).
    refine : bool
        Move predictions and residuals to the ridge solution of the linearised network. Worth it for a network that
        was not trained to a minimum.
    parameters : None, str, sequence of str, or callable
        Which parameters count, of those with requires_grad: names of modules or parameters ("head", "layers.*.bias"),
        or a callable (name, parameter) -> bool. None is all. With curvature="last_layer" it names the layer.
    memory : str or int
        Working memory, such as "2GB". The factor of the curvature comes on top.

    Attributes
    ----------
    curvature_ : the fitted curvature; its `name` says which form was taken.
    curvature_choice_ : what "auto" came to and why, in words.
    score_ : what score="auto" came to.
    residuals_ : "absolute" or "signed", what "auto" came to.
    n_rows_ : number of training rows.
    leverages_ : training leverages.
    tuning_ : the tuned l2, noise and marginal likelihood; None where l2 was given.
    shift_ : how far the network is from a minimum for this l2: the root mean square change of the training
        predictions that refinement makes, as a multiple of the residuals after it. With approximate curvature and
        without `refine` it is an estimate from a few steps of refinement, mostly too low.

    Examples
    --------
    >>> import torch, fullcp
    >>> _ = torch.manual_seed(0)
    >>> X = torch.randn(100, 3)
    >>> y = X.sum(1) + 0.1 * torch.randn(100)
    >>> net = torch.nn.Linear(3, 1)
    >>> with torch.no_grad():
    ...     _ = net.weight.fill_(1.0), net.bias.zero_()
    >>> cp = fullcp.FullConformalRegressor(net).conformalize(X, y)
    >>> y_pred, intervals = cp.predict_interval(X[:5], confidence_level=[0.9, 0.95])
    >>> y_pred.shape, intervals.shape
    (torch.Size([5]), torch.Size([5, 2, 2]))
    """

    def __init__(
        self,
        model: nn.Module,
        curvature: str = "auto",
        score: str = "auto",
        residuals: str = "auto",
        l2: Any = "marglik",
        *,
        refine: bool = False,
        parameters: Any = None,
        memory: str | int = DEFAULT_MEMORY,
    ):
        self.model = model
        self.curvature = curvature
        self.score = score
        self.residuals = residuals
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
        self._check_choices()
        only = select_parameters(self.model, self.parameters)
        rows = self._read_data(X, y)
        choice = choose(self.curvature, self.model, rows.x, only=only, memory=self._budget())
        jacobian, score = choice.jacobian, self._resolve_score(choice.structure)
        y_checked = self._check_targets(jacobian, rows)
        residuals = self._resolve_residuals(len(rows.x), jacobian.outputs)
        features = FeatureRows(jacobian, rows.x, memory=self._budget())
        e = y_checked - features.predictions
        warn_if_poor(e, y_checked)
        l2, tuning = settle(self.l2, features, e, choice.structure)
        curvature = fit_curvature(features, choice.structure, l2)
        step, refined = refine(curvature, jacobian, e, exactly=self._is_refined())
        shift = relative_shift(e, refined)
        slack = curvature.slack()
        self._warn_of_missing_scores(slack, score, choice.structure)
        refines = self._is_refined()
        self._assemble(
            curvature, features, refined if refines else e, slack, step if refines else None, residuals, score
        )
        self.curvature_choice_ = f"{choice.structure}: {choice.why}"
        self.shift_, self.tuning_ = shift, tuning
        self._keep(jacobian, len(rows.x), rows.columns)
        if not refines:
            warn_if_far(shift)
        return self

    @property
    def leverages_(self) -> Any:
        """Training leverages h_i (N,), or V_i (N, O, O) with several outputs, as NumPy."""
        self._check_fitted()
        slack = self._engine.slack
        V = torch.eye(slack.shape[1], dtype=slack.dtype, device=slack.device) - slack
        return (V[:, 0, 0] if V.shape[1] == 1 else V).cpu().numpy()

    def with_score(self, score: str | None = None, residuals: str | None = None) -> Self:
        """The same fit with another score or other residuals: curvature and leverages are shared, not computed again.

        Parameters
        ----------
        score, residuals : as of the constructor; None keeps what there is

        Returns
        -------
        A predictor of its own; this one stays as it is.
        """
        self._check_fitted()
        twin = copy(self)
        twin.score = self.score if score is None else score
        twin.residuals = self.residuals if residuals is None else residuals
        twin._check_choices()
        structure = self.curvature_choice_.partition(":")[0]
        chosen_score = self.score_ if score is None else twin._resolve_score(structure)
        chosen = self.residuals_ if residuals is None else twin._resolve_residuals(self.n_rows_, self.network_.outputs)
        e, slack = self._engine.e, self._engine.slack
        self._warn_of_missing_scores(slack, chosen_score, structure)
        twin._assemble(self.curvature_, self._features, e, slack, self._step, chosen, chosen_score)
        twin._settings = {**self._settings, "score": twin.score, "residuals": twin.residuals}
        return twin

    def score_lines(self, X: object) -> tuple[Any, Any, Any]:
        """The scores as functions of the candidate label, for one output.

        With r = y - predict(X): training point i scores |A_i - B_i r|, the new point b |r|.

        Returns
        -------
        A, B, b : (n, N), (n, N) and (n,)
        """
        rows = self._read_inputs(X)
        if self.network_.outputs > 1:
            raise ValueError("score_lines needs a model with one output: with several, scores are vectors")
        parts = [self._engine.score_lines(_phi(batch)) for _, batch in self._batches(rows.x)]
        A, B, b = (rows.origin.restore(torch.cat(tensors)) for tensors in zip(*parts, strict=True))
        return A, B, b

    def _warn_of_missing_scores(self, slack: Tensor, score: str, structure: str) -> None:
        """Say how many rows have leverages that leave no deleted or studentized score (see `fullcp.influence`)."""
        if score == "standard":
            return
        least = slack[:, 0, 0] if slack.shape[1] == 1 else torch.linalg.eigvalsh(slack)[:, 0]
        share = float((least <= 0).double().mean())
        if share > 0:
            warnings.warn(
                f"{share:.1%} of the training rows have a leverage of 1 or more by curvature={structure!r}, where "
                f"score={score!r} does not exist: they count for every label (but at test points of large cross "
                "leverage), which widens intervals, and makes them infinite at levels above the share of the others. "
                "Use score='standard', or curvature='full' or 'last_layer'",
                MissingScoreWarning,
                stacklevel=3,
            )

    def _check_choices(self) -> None:
        check_structure(self.curvature)
        check_choice("score", self.score, ("auto", *SCORES))
        check_choice("residuals", self.residuals, ("auto", *RESIDUALS))
        if not isinstance(self._is_refined(), bool):
            raise TypeError(f"refine must be True or False, got {self.refine!r}")

    def _is_refined(self) -> bool:
        return self.refine

    def _resolve_score(self, structure: str) -> str:
        if self.score == "auto":
            return "standard" if read_structure(structure)[0] in APPROXIMATE else "studentized"
        return self.score

    def _resolve_residuals(self, count: int, outputs: int) -> str:
        if outputs > 1:
            if self.residuals == "absolute":
                raise ValueError(
                    f"residuals='absolute' needs one output, the model has {outputs}: the curvature couples them, so "
                    "that an output's set depends on the other labels; use 'signed'"
                )
            return "signed"
        if self.residuals == "auto":
            return "absolute" if count <= _MOST_ROWS_FOR_ABSOLUTE else "signed"
        return self.residuals

    def _assemble(
        self,
        curvature: Curvature,
        features: FeatureRows,
        e: Tensor,
        slack: Tensor,
        step: Tensor | None,
        residuals: str,
        score: str,
    ) -> None:
        self.curvature_ = curvature
        self.residuals_, self.score_ = residuals, score
        self._features, self._step = features, step
        self._engine = Engine(curvature, features, e, slack, score=score, residuals=residuals, memory=self._budget())

    def _points_at_once(self) -> int:
        return self._engine.points

    def _centers_need_gradients(self) -> bool:
        return self._step is not None

    def _center(self, f: Tensor, phi: Tensor | None) -> Tensor:
        return f if self._step is None or phi is None else f + linear_change(self.curvature_, phi, self._step)

    def _offsets(self, batch: Batch, levels: list[Fraction]) -> Tensor:
        return self._engine.intervals(_phi(batch), levels)

    def _sets(self, batch: Batch, level: Fraction) -> list[list[list[Interval]]]:
        return self._engine.sets(_phi(batch), level)

    def _p_values(self, batch: Batch, y: Tensor) -> Tensor:
        return self._engine.p_values(_phi(batch), batch.f, y)

    def _check_rectangles(self) -> None:
        check_uncoupled(self._engine.slack, 1.0)

    def _joint_scores(self, batch: Batch, scales: Tensor) -> JointScores | PrunedScores:
        return full_scores(self._engine, _phi(batch), scales)

    def _rows_needed(self, level: Fraction) -> int:
        return rows_needed(level, self.residuals_)

    def _state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        state = {
            "x": as_tensor(self._features.x),
            "e": self._engine.e,
            "slack": self._engine.slack,
            **self.curvature_.state(),
        }
        if self._step is not None:
            state["step"] = self._step
        facts = {"residuals": self.residuals_, "score": self.score_, "choice": self.curvature_choice_}
        return state, {**facts, "shift": self.shift_, "tuning": tuning_facts(self.tuning_)}

    def _restore(self, network: dict[str, Any], state: dict[str, Tensor], facts: dict[str, Any]) -> Network:
        jacobian = Jacobian(self.model, facts=network)
        features = FeatureRows(jacobian, state["x"], memory=self._budget())
        curvature = restore(features, state)
        chosen = facts["residuals"], facts["score"]
        self._assemble(curvature, features, state["e"], state["slack"], state.get("step"), *chosen)
        self.curvature_choice_ = facts["choice"]
        self.shift_, self.tuning_ = facts["shift"], tuning_from(facts["tuning"])
        return jacobian


def warn_if_far(shift: float) -> None:
    """The closed forms are about a network at the minimum for its l2; say so where this one is not near it."""
    if shift > _FAR:
        warnings.warn(
            "the network is far from a minimum for this l2: the step to it moves the training predictions by "
            f"{shift:.2g} times the residuals that it leaves. Intervals may be too wide or too narrow: check l2 "
            "(in sum scale; the weight decay of AdamW is none), standardise X and y, train longer, or pass refine=True",
            FarFromMinimumWarning,
            stacklevel=3,
        )


def _phi(batch: Batch) -> Tensor:
    assert batch.phi is not None
    return batch.phi
