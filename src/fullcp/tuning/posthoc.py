"""Tuning l2 and noise on a trained network: the maximum of the marginal likelihood, weights as they are."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fullcp.curvature import NotPositiveDefiniteError, low_rank_error, low_rank_ranks, read_structure
from fullcp.features import FeatureRows
from fullcp.tuning.builders import evidence_of
from fullcp.tuning.evidence import BOUND, Evidence, penalty
from fullcp.tuning.leave_one_out import leave_one_out_scale

_MOST_FOR_LAYERS = 2000  # each value takes a Cholesky and an inverse of this size, some 0.3 s on two cores


@dataclass(frozen=True)
class Tuning:
    """Where the marginal likelihood is largest.

    Attributes
    ----------
    l2 : array (G,)
        The ridge penalty in sum scale, noise^2 times the prior precision: one a parameter tensor, or one for all.
    noise : standard deviation of the observation noise.
    log_marginal_likelihood : its value there.
    evaluations : how many values that took.
    structure : "layer" or "scalar"
    scale : what l2 was then multiplied by, to make leave-one-out residuals small.
    """

    l2: NDArray[np.float64]
    noise: float
    log_marginal_likelihood: float
    evaluations: int
    structure: str
    scale: float = 1.0


def tune(features: FeatureRows, e: Tensor, *, structure: str = "auto", curvature: str = "full") -> Tuning:
    """Maximise the Laplace marginal likelihood over l2 and noise, by L-BFGS with exact gradients.

    Parameters
    ----------
    features : gradients of the rows the network was trained on.
    e : Tensor (N, O)
        Residuals y - f.
    structure : "layer", "scalar" or "auto"
        "auto" is one l2 a parameter tensor up to 2,000 parameters or rows, whichever is fewer; beyond (and where the
        kernels of a large network exceed the memory budget) one for all, which takes a single eigendecomposition.
    curvature : the structure of S; KFAC and diagonal curvature are decomposed once, whatever the number of l2. With
        "low_rank" a lower bound of the marginal likelihood is maximised, which holds what S lacks by its trace
        alone (see `WithRest`); the rank grows until leverages are known to one per cent at the l2 that comes out.
    """
    if structure == "auto":
        structure = _structure_within(features, curvature)
    word, given = read_structure(curvature)
    if word != "low_rank":
        return _maximise(evidence_of(features, e, structure, curvature), e, structure)
    for rank in low_rank_ranks(features, given):
        tuning = _maximise(evidence_of(features, e, structure, f"low_rank:{rank}"), e, structure)
        if low_rank_error(features, tuning.l2).is_small:
            break
    return tuning


def _maximise(evidence: Evidence, e: Tensor, structure: str) -> Tuning:
    """The l2 and noise of the largest marginal likelihood, for residuals e (N, O)."""
    from scipy.optimize import minimize

    start = np.zeros(evidence.groups + 1)
    start[-1] = np.log(max(float(evidence.squared_error) / e.numel(), 1e-6))

    def objective(x: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        at = torch.from_numpy(x).to(e.device)
        found = evidence(at[None, :-1], at[-1:])
        if not bool(found.value.isfinite()):
            l2 = ", ".join(f"{value:.3g}" for value in penalty(at[None, :-1], at[-1:])[0].tolist())
            raise NotPositiveDefiniteError(
                f"the marginal likelihood has no value at l2 = noise^2 x precision = [{l2}]: S + diag(l2) is singular "
                "in float64, the smallest l2 is too small for its gradients"
            )
        gradient = torch.cat([found.in_log_precision[0], found.in_log_variance])
        return -float(found.value), -gradient.cpu().numpy()

    best = minimize(objective, start, jac=True, method="L-BFGS-B", bounds=[(-BOUND, BOUND)] * len(start))
    variance = float(np.exp(best.x[-1]))
    l2 = variance * np.exp(best.x[:-1])
    return Tuning(l2, variance**0.5, -float(best.fun), int(best.nfev), structure)


def _structure_within(features: FeatureRows, curvature: str) -> str:
    if curvature in ("kfac", "diagonal"):
        return "layer"
    word, rank = read_structure(curvature)
    if word == "low_rank":
        most = low_rank_ranks(features, rank)[-1]
        kernels = 8 * len(features.jacobian.parameters) * most**2
        return "layer" if most <= _MOST_FOR_LAYERS and kernels <= features.memory // 2 else "scalar"
    if curvature == "last_layer":
        return "layer" if features.size <= _MOST_FOR_LAYERS * features.outputs else "scalar"
    n, groups = features.count * features.outputs, len(features.jacobian.parameters)
    kernels = 0 if features.size <= n else 8 * groups * n**2
    return "layer" if min(n, features.size) <= _MOST_FOR_LAYERS and kernels <= features.memory // 2 else "scalar"


def settle(l2: object, features: FeatureRows, e: Tensor, curvature: str) -> tuple[object, Tuning | None]:
    """The penalty a predictor was given; for "marglik" and "leave_one_out" the one tuned with its curvature."""
    if not isinstance(l2, str):
        return l2, None
    if l2 not in ("marglik", "leave_one_out"):
        raise ValueError(f"l2 must be 'marglik', a number or an array of numbers, or 'leave_one_out', got {l2!r}")
    tuning = tune(features, e, curvature=curvature)
    if l2 == "leave_one_out":
        scale = leave_one_out_scale(features, e, torch.from_numpy(tuning.l2), curvature)
        tuning = replace(tuning, l2=scale * tuning.l2, scale=scale)
    return tuning.l2, tuning


def tuning_facts(tuning: Tuning | None) -> dict[str, Any] | None:
    """A tuning for JSON."""
    return None if tuning is None else {**asdict(tuning), "l2": tuning.l2.tolist()}


def tuning_from(facts: dict[str, Any] | None) -> Tuning | None:
    """And back."""
    return None if facts is None else Tuning(**{**facts, "l2": np.array(facts["l2"])})
