"""What a structure is told of test points: their gradients phi, or the points themselves where phi is too large."""

from __future__ import annotations

from torch import Tensor

from fullcp.curvature.base import Curvature
from fullcp.curvature.kernels import KernelCurvature
from fullcp.curvature.part import PartOfRows
from fullcp.features import Network


def look_at(curvature: object, network: Network, x: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs (m, O) of the points x (m, ...), and what `Curvature.query` takes of them.

    Parameters
    ----------
    network : the `Jacobian` that the curvature is made of.
    """
    if isinstance(_whole(curvature), KernelCurvature):
        return network.predict(x), x
    return network(x)  # type: ignore[operator]


def points_within(curvature: object, network: Network, budget: int) -> int:
    """How many points to look at at a time within `budget` bytes."""
    curvature = _whole(curvature)
    if isinstance(curvature, KernelCurvature):
        return curvature.rows.points_within(budget)
    return network.rows_per_chunk(budget)


def linear_change(curvature: Curvature, points: Tensor, step: Tensor) -> Tensor:
    """Phi Delta (m, O), what a step Delta (D,) adds to the predictions of points as `look_at` gives them."""
    whole = _whole(curvature)
    if isinstance(whole, KernelCurvature):
        return whole.change(points, step)
    return points.double() @ step


def _whole(curvature: object) -> object:
    return curvature.whole if isinstance(curvature, PartOfRows) else curvature
