"""A curvature over many rows, asked about the last of them only."""

from __future__ import annotations

from torch import Tensor

from fullcp.curvature.base import EVERY, Curvature, Query
from fullcp.curvature.full import PrimalCurvature
from fullcp.curvature.kernels import KernelCurvature
from fullcp.curvature.last_layer import LastLayerCurvature, penultimate_rows
from fullcp.features import FeatureRows, RowIndex


class PartOfRows:
    """H over all rows; slacks and cross leverages are those of the rows from number `skip` on.

    Parameters
    ----------
    whole : H, in a form that needs all of its rows.
    skip : how many rows come before those asked about.
    """

    stands_alone = False

    def __init__(self, whole: Curvature, skip: int):
        self.whole, self.skip = whole, skip
        self.name = whole.name
        self.selective, self.independent = whole.selective, whole.independent

    def slack(self) -> Tensor:
        """I - V_i of the rows from `skip` on, (n, O, O)."""
        return self.whole.slack()[self.skip :]

    def leverage(self, phi: Tensor) -> Tensor:
        """V of test points, (m, O, O)."""
        return self.whole.leverage(phi)

    def query(self, phi: Tensor) -> Query:
        """Leverages and cross leverages of test points, with the rows counted from `skip` on."""
        return self._moved(self.whole.query(phi))

    def _moved(self, query: Query) -> Query:
        skip = self.skip

        def cross(rows: RowIndex, points: RowIndex = EVERY) -> Tensor:
            moved = slice(rows.start + skip, rows.stop + skip) if isinstance(rows, slice) else rows + skip
            return query.cross(moved, points)

        return Query(query.leverage, cross, None if query.single is None else self._moved(query.single))

    def solve(self, vectors: Tensor) -> Tensor:
        """H^-1 times vectors (D,) or (D, m)."""
        return self.whole.solve(vectors)

    def refine(self, e: Tensor, weights: Tensor, *, exactly: bool = True) -> tuple[Tensor, Tensor]:
        """That of all rows, whose residuals e (N, O) are wanted."""
        return self.whole.refine(e, weights, exactly=exactly)

    def state(self) -> dict[str, Tensor]:
        """That of all rows."""
        return self.whole.state()


def last_rows(curvature: Curvature, features: FeatureRows, skip: int) -> Curvature:
    """The exact curvature of all rows, asked about the last of them only; rows are let go where they can be.

    Parameters
    ----------
    curvature : over all rows, full or last layer.
    features : the rows from number `skip` on.
    """
    if isinstance(curvature, PrimalCurvature):
        features.hold()
        return PrimalCurvature(features, curvature.diagonal, factor=curvature.factor)
    if isinstance(curvature, LastLayerCurvature):
        rows = penultimate_rows(features)
        return LastLayerCurvature(rows, last_rows(curvature.single, rows, skip), curvature.diagonal)
    if isinstance(curvature, KernelCurvature):
        features.forgo()
    return PartOfRows(curvature, skip)


def needs_all_rows(curvature: Curvature) -> bool:
    """Whether what `last_rows` gave still needs the rows before."""
    inner = curvature.single if isinstance(curvature, LastLayerCurvature) else curvature
    return isinstance(inner, PartOfRows)
