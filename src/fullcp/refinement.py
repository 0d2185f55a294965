"""Refinement: the ridge solution of the linearised network, one solve away (docs/theory.md).

theta~ = H^-1 phi^T (phi theta_* + e) is theta_* + Delta, where H Delta = phi^T e - l2 theta_* is minus the gradient of
the ridge objective. With it the closed forms of `influence` are exact for the linearised network. The solve itself is
the curvature's: each structure has its own way to lose no digits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fullcp.curvature import Curvature
from fullcp.features import Jacobian


def refine(curvature: Curvature, jacobian: Jacobian, e: Tensor, *, exactly: bool = True) -> tuple[Tensor, Tensor]:
    """The step Delta (D,) from the trained weights to the ridge solution, and the residuals e - phi Delta (N, O).

    Without `exactly`, good enough to see how far the network is from its minimum.
    """
    weights = torch.cat([p.detach().flatten().double() for p in jacobian.parameters.values()])
    return curvature.refine(e, weights, exactly=exactly)


def relative_shift(e: Tensor, refined: Tensor) -> float:
    """Root mean square change of the training predictions, as a multiple of the residuals after it."""
    change, left = (refined - e).square().mean().sqrt(), refined.square().mean().sqrt()
    return float(change / left.clamp(min=torch.finfo(e.dtype).tiny))
