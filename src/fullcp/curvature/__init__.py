"""H and the leverages: one file a structure, one small protocol."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fullcp.curvature.base import Curvature, NotPositiveDefiniteError, Query, WhiteningCurvature
from fullcp.curvature.choice import Choice, choose
from fullcp.curvature.diagonal import diagonal_blocks, fit_diagonal, restore_diagonal
from fullcp.curvature.eigen import Block
from fullcp.curvature.full import fit_full, fit_whitened, form_for, restore_full
from fullcp.curvature.kernels import KernelCurvature
from fullcp.curvature.kfac import fit_kfac, kfac_blocks, restore_kfac
from fullcp.curvature.last_layer import fit_last_layer, last_layer_gram, penultimate_rows, restore_last_layer
from fullcp.curvature.low_rank import (
    LowRankWarning,
    fit_low_rank,
    low_rank_error,
    low_rank_factor,
    low_rank_ranks,
    restore_low_rank,
)
from fullcp.curvature.part import PartOfRows, last_rows, needs_all_rows
from fullcp.curvature.penalty import expand_l2
from fullcp.curvature.points import linear_change, look_at, points_within
from fullcp.curvature.ridge import RefinementWarning
from fullcp.curvature.words import STRUCTURES, check_structure, read_structure
from fullcp.features import FeatureRows, Jacobian
from fullcp.features.penultimate import last_layer_parameters
from fullcp.sources import Inputs

APPROXIMATE = ("kfac", "diagonal", "low_rank")  # leverages of training rows can reach 1 there
_FITS: dict[str, Callable[..., Curvature]] = {
    "auto": fit_full,
    "full": fit_full,
    "kfac": fit_kfac,
    "last_layer": fit_last_layer,
    "diagonal": fit_diagonal,
}
_BLOCKS: dict[str, Callable[[FeatureRows], list[Block]]] = {"kfac": kfac_blocks, "diagonal": diagonal_blocks}

__all__ = [
    "APPROXIMATE",
    "STRUCTURES",
    "Choice",
    "Curvature",
    "KernelCurvature",
    "LowRankWarning",
    "NotPositiveDefiniteError",
    "PartOfRows",
    "Query",
    "RefinementWarning",
    "WhiteningCurvature",
    "check_structure",
    "choose",
    "expand_l2",
    "fit_curvature",
    "fit_whitened",
    "form_for",
    "jacobian_for",
    "last_layer_gram",
    "last_rows",
    "linear_change",
    "look_at",
    "low_rank_error",
    "low_rank_factor",
    "low_rank_ranks",
    "needs_all_rows",
    "penultimate_rows",
    "points_within",
    "read_structure",
    "restore",
    "spectrum",
]


def jacobian_for(curvature: str, model: nn.Module, x: Inputs) -> Jacobian:
    """The gradients that a structure is made of: in all trainable parameters, or in those of the last layer alone."""
    return Jacobian(model, x, only=last_layer_parameters(model, x) if curvature == "last_layer" else None)


def fit_curvature(features: FeatureRows, curvature: str, l2: object, *, cross: bool = True) -> Curvature:
    """Fit the structure named by `curvature` ("auto" is "full") to the rows of `features`.

    Parameters
    ----------
    features : gradients of the training rows, from `jacobian_for` the structure.
    curvature : one of `STRUCTURES`, or "low_rank:200".
    l2 : the ridge penalty, see `fullcp.curvature.penalty`.
    cross : bool
        Without it, only leverages of new points will be asked for, and no training row is held for more.
    """
    word, rank = read_structure(curvature)
    if word == "low_rank":
        return fit_low_rank(features, l2, cross=cross, rank=rank)
    return _FITS[word](features, l2, cross=cross)


def restore(features: FeatureRows, state: dict[str, Tensor]) -> Curvature:
    """The structure whose `state()` was saved, over the same rows."""
    if "eigenvalues" in state:
        return restore_kfac(features, state) if "eigen.0.left" in state else restore_diagonal(features, state)
    if "low_rank.vectors" in state:
        return restore_low_rank(features, state)
    last_layer = any(key.startswith("last_layer.") for key in state)
    return restore_last_layer(features, state) if last_layer else restore_full(features, state)


def spectrum(features: FeatureRows, curvature: str) -> tuple[Tensor, Tensor]:
    """The eigenvalues of S = sum_i phi_i phi_i^T in a block-diagonal structure, before l2 is known.

    The next fit of the structure to the same `features` takes the decomposition up.

    Parameters
    ----------
    curvature : "kfac" or "diagonal"

    Returns
    -------
    eigenvalues : Tensor (D,)
    tensor_index : Tensor (D,)
        The place of each one's parameter tensor among `features.jacobian.parameters`.
    """
    blocks = features.kept[curvature] = _BLOCKS[curvature](features)
    sizes = torch.tensor([block.eigenvalues.numel() for block in blocks], device=features.x.device)
    index = torch.repeat_interleave(torch.arange(len(blocks), device=features.x.device), sizes)
    return torch.cat([block.eigenvalues.flatten() for block in blocks]), index
