"""H and the leverages: one file a structure, one small protocol."""

from fullcp.curvature.base import Curvature, NotPositiveDefiniteError, Query
from fullcp.curvature.full import fit_full, restore_full
from fullcp.curvature.penalty import expand_l2
from fullcp.features import FeatureRows

STRUCTURES = ("auto", "full")

__all__ = ["STRUCTURES", "Curvature", "NotPositiveDefiniteError", "Query", "expand_l2", "fit_curvature", "restore_full"]


def fit_curvature(features: FeatureRows, curvature: str, l2: object, *, cross: bool = True) -> Curvature:
    """Fit the structure named by `curvature` ("auto" is "full") to the rows of `features`.

    Without `cross`, only leverages of new points will be asked for, and no training row is held for more.
    """
    assert curvature in STRUCTURES
    return fit_full(features, l2, cross=cross)
