"""Intervals, sets and p-values for test points, in blocks of test x train numbers that fit the memory budget."""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor

from fullcp.curvature import Curvature, points_within
from fullcp.features import FeatureRows
from fullcp.influence import absolute_changepoints, score_lines, signed_changepoints, signed_changepoints_blocks
from fullcp.inputs import check_all_finite
from fullcp.memory import rows_within
from fullcp.regions import (
    Interval,
    absolute_intervals,
    absolute_p_values,
    absolute_set,
    signed_intervals,
    signed_p_values,
)


class Engine:
    """Full conformal prediction with a fixed curvature and fixed training residuals.

    Parameters
    ----------
    curvature : H over the training rows.
    features : the training rows.
    e : Tensor (N, O)
        Training residuals.
    slack : Tensor (N, O, O)
        I - V_i, see `Curvature.slack`.
    score : "standard", "deleted" or "studentized"
    residuals : "absolute" (one output) or "signed"
    memory : budget in bytes; a quarter of it may hold a block of test x train numbers.
    """

    def __init__(
        self,
        curvature: Curvature,
        features: FeatureRows,
        e: Tensor,
        slack: Tensor,
        *,
        score: str,
        residuals: str,
        memory: int,
    ):
        self.curvature, self.features, self.e, self.slack = curvature, features, e, slack
        self.score, self.residuals = score, residuals
        N, O = e.shape
        in_flight = 12 * 8 * min(features.chunk, N) * O * O  # the arrays of one chunk of training rows
        bytes_per_point = 2 * 8 * N * O + 2 * 8 * N * O * O + in_flight
        self.points = min(
            rows_within(memory // 4, bytes_per_point, at_most=4096),
            points_within(curvature, features.jacobian, memory // 8),
        )

    def intervals(self, phi: Tensor, levels: list[Fraction]) -> Tensor:
        """Ends of the intervals of m test points phi (m, O, D) relative to the predictions: (m, 2, L, O)."""
        lower, upper = self._changepoints(phi)
        ends = absolute_intervals if self.residuals == "absolute" else signed_intervals
        return torch.stack(
            [ends(low, low if upper is lower else up, levels) for low, up in zip(lower, upper, strict=True)], dim=3
        )

    def sets(self, phi: Tensor, level: Fraction) -> list[list[list[Interval]]]:
        """The exact sets, for each test point and output the disjoint intervals relative to the prediction."""
        if self.residuals == "signed":
            ends = self.intervals(phi, [level])[:, :, 0]  # (m, 2, O)
            return [[[(low, high)] for low, high in point.T.tolist()] for point in ends]
        left, right = self._changepoints(phi)
        return [[absolute_set(a, b, level)] for a, b in zip(left[0], right[0], strict=True)]

    def p_values(self, phi: Tensor, f: Tensor, y: Tensor) -> Tensor:
        """Conformal p-values of labels y (m, O) where f (m, O) is predicted: (m, O)."""
        lower, upper = self._changepoints(phi)
        value = absolute_p_values if self.residuals == "absolute" else signed_p_values
        return torch.stack([value(lower[o], upper[o], f[:, o], y[:, o]) for o in range(y.shape[1])], dim=1)

    def score_lines(self, phi: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A, B (m, N) and b (m,) of one output, see `influence.score_lines`."""
        query = self.curvature.query(phi)
        c = torch.cat([query.cross(rows)[..., 0, 0] for rows in self.features.slices()], dim=1)
        return score_lines(self.score, self.e[:, 0], self.slack[:, 0, 0], c, query.leverage[:, 0, 0])

    def _changepoints(self, phi: Tensor) -> tuple[Tensor, Tensor]:
        """Both kinds of changepoint, (O, m, N) each; one and the same tensor where they are equal."""
        query = self.curvature.query(phi)
        check_all_finite(None, {"leverages": query.leverage})
        N, O = self.e.shape
        lower = phi.new_empty(O, len(phi), N, dtype=torch.float64)
        upper = lower
        for rows in self.features.slices():
            low, up = self._of_rows(rows, query.cross(rows), query.leverage)
            if up is not low and upper is lower:
                upper = lower.clone()
            lower[:, :, rows] = low
            if upper is not lower:
                upper[:, :, rows] = up
        return lower, upper

    def _of_rows(self, rows: slice, C: Tensor, V: Tensor) -> tuple[Tensor, Tensor]:
        """Changepoints of a slice of n training rows from their cross leverages C (m, n, O, O): (O, m, n) each."""
        if self.e.shape[1] > 1:
            low, up = signed_changepoints_blocks(self.score, self.e[rows], self.slack[rows], C, V)
        else:
            points = absolute_changepoints if self.residuals == "absolute" else signed_changepoints
            low, up = points(self.score, self.e[rows, 0], self.slack[rows, 0, 0], C[..., 0, 0], V[:, 0, 0])
        first = low.view(*C.shape[:2], -1).permute(2, 0, 1)
        return first, first if up is low else up.view(*C.shape[:2], -1).permute(2, 0, 1)
