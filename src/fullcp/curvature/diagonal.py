"""The diagonal of the Gauss-Newton matrix: every parameter on its own."""

from __future__ import annotations

import torch
from torch import Tensor

from fullcp.curvature.eigen import Block, EigenCurvature, expand_over, restore_blocks
from fullcp.features import FeatureRows

NAME = "diagonal"


def fit_diagonal(features: FeatureRows, l2: object, *, cross: bool = True) -> EigenCurvature:
    """H = diag(sum_i phi_i^2 + l2) over the rows of `features`; see `fullcp.curvature.fit_curvature`."""
    diagonal = expand_over(features, l2)
    if cross:
        features.hold()
    return EigenCurvature(features, features.kept.pop(NAME, None) or diagonal_blocks(features), diagonal, name=NAME)


def restore_diagonal(features: FeatureRows, state: dict[str, Tensor]) -> EigenCurvature:
    """The structure whose `state()` was saved, over the same rows."""
    return EigenCurvature(features, restore_blocks(features, state), state["l2"], name=NAME)


def diagonal_blocks(features: FeatureRows) -> list[Block]:
    """The diagonal of sum_i phi_i phi_i^T, a block a parameter tensor."""
    squares = torch.zeros(features.size, dtype=torch.float64, device=features.x.device)
    for _, phi in features.chunks("curvature"):
        squares += phi.flatten(0, 1).double().square().sum(0)
    sizes = [p.numel() for p in features.jacobian.parameters.values()]
    return [Block(part.unsqueeze(0)) for part in torch.split(squares, sizes)]
