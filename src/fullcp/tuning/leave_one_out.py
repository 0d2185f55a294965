"""A scale for l2 by leave-one-out residuals: what the marginal likelihood leaves, which tends to shrink too much."""

from __future__ import annotations

import torch
from torch import Tensor

from fullcp.curvature import NotPositiveDefiniteError, fit_curvature, read_structure
from fullcp.features import FeatureRows
from fullcp.progress import track

SCALES = tuple(10.0 ** (k / 2) for k in range(-3, 4))


def leave_one_out_scale(features: FeatureRows, e: Tensor, l2: Tensor, curvature: str) -> float:
    """The factor, of `SCALES`, whose l2 makes the mean of |q_i| smallest, q_i = e_i / (1 - h_i) at the ridge solution.

    Parameters
    ----------
    features : gradients of the rows the network was trained on.
    e : Tensor (N, O)
        Residuals y - f.
    l2 : Tensor (G,)
        The penalty to scale.
    curvature : an exact structure; leverages of the others can reach 1, where q_i does not exist.
    """
    if read_structure(curvature)[0] not in ("full", "last_layer"):
        raise ValueError(
            f"l2='leave_one_out' needs exact curvature, 'full' or 'last_layer', got {curvature!r}: use 'marglik'"
        )
    weights = torch.cat([p.detach().flatten().double() for p in features.jacobian.parameters.values()])
    found: dict[float, float] = {}
    for scale in track(SCALES, "leave one out", len(SCALES)):
        try:
            fitted = fit_curvature(features, curvature, scale * l2)
        except NotPositiveDefiniteError:
            continue  # too small
        _, refined = fitted.refine(e, weights)
        found[scale] = float(torch.linalg.solve(fitted.slack(), refined.unsqueeze(2)).abs().mean())
    return min(found, key=lambda scale: (found[scale], scale)) if found else 1.0
