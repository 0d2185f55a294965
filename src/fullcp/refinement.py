"""Refinement: the ridge solution of the linearised network, one solve away (docs/theory.md).

theta~ = H^-1 phi^T (phi theta_* + e) is theta_* + Delta, where H Delta = phi^T e - l2 theta_* is minus the gradient of
the ridge objective. With it the closed forms of `influence` are exact for the linearised network.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fullcp.curvature import Curvature, expand_l2
from fullcp.features import FeatureRows

# The second solve, from the gradient at the first solution, takes the rounding of the first one away: far from the
# minimum Delta is large and the residuals that are left may be small.
_SOLVES = 2


def refine(curvature: Curvature, features: FeatureRows, e: Tensor, l2: object) -> tuple[Tensor, Tensor]:
    """The step from the trained weights to the ridge solution on the rows of `features`.

    Parameters
    ----------
    e : Tensor (N, O)
        Residuals of the trained network, y - f.

    Returns
    -------
    step : Tensor (D,)
        Delta.
    refined : Tensor (N, O)
        e_i - phi_i Delta.
    """
    parameters = features.jacobian.parameters
    diagonal = expand_l2(l2, parameters, e.device)
    weights = torch.cat([p.detach().flatten().double() for p in parameters.values()])
    step, refined = torch.zeros_like(diagonal), e.clone()
    for _ in range(_SOLVES):
        descent = -diagonal * (weights + step)
        for rows, phi in features.chunks("refinement"):
            descent += torch.einsum("nod,no->d", phi.double(), refined[rows])
        step += curvature.solve(descent)
        for rows, phi in features.chunks("refinement"):
            refined[rows] = e[rows] - linear_change(phi, step)
    return step, refined


def linear_change(phi: Tensor, step: Tensor) -> Tensor:
    """Phi Delta, what the step adds to the predictions: (n, O) for phi (n, O, D)."""
    return phi.double() @ step
