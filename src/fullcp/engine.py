"""Intervals, sets and p-values for test points, in blocks of test x train numbers that fit the memory budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction

import torch
from torch import Tensor

from fullcp.curvature import Curvature, Query, points_within
from fullcp.features import FeatureRows
from fullcp.grouping import groups_by_label, groups_by_rank
from fullcp.influence import absolute_changepoints, score_lines, signed_changepoints, signed_changepoints_blocks
from fullcp.inputs import check_all_finite
from fullcp.memory import rows_within
from fullcp.pruning import SortedRows, Surroundings, Window
from fullcp.regions import (
    Interval,
    absolute_p_values,
    absolute_rank,
    rounding_room,
    signed_intervals,
    signed_p_values,
    signed_ranks,
    sweep,
    two_sided,
)

Ranks = list[tuple[int, int]]

_FEWEST_ROWS = 256  # below, bounds take longer than the products they spare
_IN_FLIGHT = 6  # arrays of test x train numbers at a time


class Engine:
    """Full conformal prediction with a fixed curvature and fixed training residuals.

    Where cross leverages are had row by row, intervals ask for those of the rows that can matter alone (`pruning`).

    Parameters
    ----------
    curvature : H over the training rows.
    features : the training rows.
    e : Tensor (N, O)
        Training residuals.
    slack : Tensor (N, O, O)
        I - V_i, see `Curvature.slack`.
    score : "standard", "deleted" or "studentized"
    residuals : "absolute" (one output, or independent ones) or "signed"
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
        self.score, self.residuals, self.memory = score, residuals, memory
        N, O = e.shape
        self.each = O == 1 or curvature.independent  # whether an output is the case of one output
        self.prunes = self.each and curvature.selective and _FEWEST_ROWS <= N
        self._sorted: dict[int, SortedRows] = {}
        self._sorted_by: tuple[object, SortedRows] | None = None
        self.points = points_within(curvature, features.jacobian, memory // 8)
        if not self.prunes:
            in_flight = 12 * 8 * min(features.chunk, N) * O * O  # the arrays of one chunk of training rows
            bytes_per_point = 2 * 8 * N * O + 2 * 8 * N * O * O + in_flight
            self.points = min(rows_within(memory // 4, bytes_per_point, at_most=4096), self.points)

    def intervals(self, phi: Tensor, levels: list[Fraction]) -> Tensor:
        """Ends of the intervals of m test points phi (m, O, D) relative to the predictions: (m, 2, L, O)."""
        query = self.query(phi)
        if query.of_one is None:
            return torch.stack([signed_intervals(low, up, levels) for low, up in self._coupled(query)], dim=3)
        hulls = [self._hulls(o, query.of_one, self._ranks(levels)) for o in range(self.e.shape[1])]
        return torch.stack([ends for ends, _ in hulls], dim=3)

    def sets(self, phi: Tensor, level: Fraction) -> list[list[list[Interval]]]:
        """The exact sets, for each test point and output the disjoint intervals relative to the prediction."""
        if self.residuals == "signed":
            ends = self.intervals(phi, [level])[:, :, 0]  # (m, 2, O)
            return [[[(low, high)] for low, high in point.T.tolist()] for point in ends]
        query = self.query(phi).of_one
        assert query is not None
        found = []
        for o in range(self.e.shape[1]):
            hulls, unions = self._hulls(o, query, self._ranks([level]))
            sets = [[(low, high)] for low, high in hulls[:, :, 0].tolist()]
            found.append([unions[i][0] if i in unions else sets[i] for i in range(len(sets))])
        return [list(point) for point in zip(*found, strict=True)]

    def p_values(self, phi: Tensor, f: Tensor, y: Tensor) -> Tensor:
        """Conformal p-values of labels y (m, O) where f (m, O) is predicted: (m, O)."""
        query = self.query(phi)
        value = absolute_p_values if self.residuals == "absolute" else signed_p_values
        if query.of_one is None:
            pairs = self._coupled(query)
            return torch.stack([value(low, up, f[:, o], y[:, o]) for o, (low, up) in enumerate(pairs)], dim=1)
        p = torch.empty_like(y)
        for o in range(y.shape[1]):
            for points, around in self._surroundings(o, query.of_one.leverage[:, 0, 0], f[:, o], y[:, o]):
                rows = None if around is None else around.rows
                for some, lower, upper in self._changepoints(o, query.of_one, points, rows):
                    at = points[some]
                    others = (0, 0) if around is None else around.others(some, len(self.e))
                    p[at, o] = value(lower, upper, f[at, o], y[at, o], others)
        return p

    def score_lines(self, phi: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A, B (m, N) and b (m,) of one output, see `influence.score_lines`."""
        query = self.query(phi)
        c = self.cross(query, slice(None), None)
        return score_lines(self.score, self.e[:, 0], self.slack[:, 0, 0], c, query.leverage[:, 0, 0])

    def query(self, phi: Tensor) -> Query:
        """Leverages and cross leverages of m test points phi (m, O, D)."""
        query = self.curvature.query(phi)
        check_all_finite(None, {"leverages": query.leverage})
        return query

    # One output, or each of several independent ones

    def _hulls(self, o: int, query: Query, ranks: Ranks) -> tuple[Tensor, dict[int, list[list[Interval]]]]:
        """Ends of output o's intervals (m, 2, L), and of the points whose sets may be unions the sets, L of them."""
        h = query.leverage[:, 0, 0]
        ends, rays = h.new_empty(len(h), 2, len(ranks)), torch.zeros_like(h, dtype=torch.bool)
        for points, window in self._windows(o, h, ranks):
            rows = None if window is None else window.rows
            for part, lower, upper in self._changepoints(o, query, points, rows):
                some = points[part]
                if self.residuals == "absolute":
                    rays[some] = (lower > upper).any(1)
                ends[some] = two_sided(lower, upper, *self._places(ranks, window))
        unions = self._swept(o, query, rays.nonzero()[:, 0], ranks)
        for i, sets in unions.items():
            ends[i] = ends.new_tensor([[pieces[0][0] for pieces in sets], [pieces[-1][1] for pieces in sets]])
        return ends, unions

    def _windows(self, o: int, h: Tensor, ranks: Ranks) -> Iterator[tuple[Tensor, Window | None]]:
        """Groups of test points of leverages h (m,), each with the rows that can matter to them; None is all rows."""
        wanted = self._wanted(ranks)
        if not self.prunes or not wanted:
            return iter([(torch.arange(len(h), device=h.device), None)])
        return groups_by_rank(self._sorted_rows(o), h, wanted, self.memory // 8)

    def _surroundings(self, o: int, h: Tensor, f: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Surroundings | None]]:
        """Groups of test points with labels near each other, each with the rows whose side of them is not certain."""
        if not self.prunes or len(h) == 0:
            return iter([(torch.arange(len(h), device=h.device), None)])
        r = (y - f).abs() if self.residuals == "absolute" else y - f
        z, room = r / (1 + h), 2 * rounding_room(f, y) / (1 + h)
        rows, width = self._sorted_rows(o), self.features.size
        return groups_by_label(rows, h, z - room, z + room, width, self.memory // 8)

    def _sorted_rows(self, o: int) -> SortedRows:
        if o not in self._sorted:
            e = self.e[:, o].abs() if self.residuals == "absolute" else self.e[:, o]
            self._sorted[o] = SortedRows(self.score, e, self.slack[:, o, o])
        return self._sorted[o]

    def sorted_by(self, key: object, sizes: Callable[[], Tensor]) -> SortedRows:
        """Rows in the order of other sizes of residuals (N,), kept for the next time that the key is the same."""
        kept = self._sorted_by
        if kept is None or kept[0] != key:
            kept = self._sorted_by = (key, SortedRows(self.score, sizes(), self.slack[:, 0, 0]))
        return kept[1]

    def _swept(self, o: int, query: Query, points: Tensor, ranks: Ranks) -> dict[int, list[list[Interval]]]:
        """The exact sets of points to which some row contributes two rays: no order statistic has their ends."""
        found = {}
        for some, *ends in self._changepoints(o, query, points):
            for i, left, right in zip(points[some].tolist(), *ends, strict=True):
                found[i] = sweep(left, right, [low for low, _ in ranks])
        return found

    def _ranks(self, levels: list[Fraction]) -> Ranks:
        """For each level the ranks of the lower and of the upper end among N changepoints; 0 and N + 1 are infinite."""
        N = len(self.e)
        if self.residuals == "absolute":
            return [(N + 1 - k, k) for k in (absolute_rank(level, N) for level in levels)]
        return [signed_ranks(level, N) for level in levels]

    def _wanted(self, ranks: Ranks) -> list[int]:
        """The finite ones as ranks of what rows are sorted by: for absolute residuals both ends have the same."""
        both = {k for _, k in ranks} if self.residuals == "absolute" else {k for pair in ranks for k in pair}
        return sorted(both - {0, len(self.e) + 1})

    def _places(self, ranks: Ranks, window: Window | None) -> tuple[list[int], list[int]]:
        """The ranks of lower and upper ends among the rows of a window; infinite ones stay infinite."""
        low, high = [k for k, _ in ranks], [k for _, k in ranks]
        if window is None:
            return low, high
        wanted, S = self._wanted(ranks), len(window.rows)
        inside = {0: 0, len(self.e) + 1: S + 1, **dict(zip(wanted, window.ranks(wanted), strict=True))}
        high = [inside[k] for k in high]
        return [S + 1 - k for k in high] if self.residuals == "absolute" else [inside[k] for k in low], high

    def parts(self, points: Tensor, rows: Tensor | None) -> list[Tensor]:
        """Test points in parts whose arrays with some rows (None: all) fit the budget."""
        if len(points) == 0:
            return []
        count = len(self.e) if rows is None else len(rows)
        return list(torch.split(points, rows_within(self.memory // 4, _IN_FLIGHT * 8 * count, at_most=4096)))

    def _changepoints(
        self, o: int, query: Query, points: Tensor, rows: Tensor | None = None
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Both kinds of changepoint of some rows (None: all), (m, n) each, for part by part of the points.

        The places of a part among the points come with them. Cross leverages are had for several parts at once: rows
        that are not held are computed again for each such product.
        """
        ends = absolute_changepoints if self.residuals == "absolute" else signed_changepoints
        e, s = self.e[:, o], self.slack[:, o, o]
        e, s = (e, s) if rows is None else (e[rows], s[rows])
        every = torch.arange(len(points), device=points.device)
        together, part = (rows_within(self.memory // 8, k * 8 * len(e), at_most=4096) for k in (1, _IN_FLIGHT))
        for some in torch.split(every, together) if len(every) else ():
            c, h = self.cross(query, points[some], rows), query.leverage[points[some], 0, 0]
            for at in torch.split(torch.arange(len(some), device=points.device), part):
                yield some[at], *ends(self.score, e, s, c[at], h[at])

    def cross(self, query: Query, points: slice | Tensor, rows: Tensor | None) -> Tensor:
        """Cross leverages c (m, n) of some points and rows (None: all)."""
        if rows is not None and len(rows) == 0:  # every row is on a certain side of the labels
            return query.leverage.new_empty(len(query.leverage[points]), 0)
        parts: list[slice] | list[Tensor] = self.features.slices()
        if rows is not None:
            size, chunk = rows_within(self.memory // 8, 12 * self.features.size, at_most=len(rows)), self.features.chunk
            parts = list(torch.split(rows, size if size < chunk else size // chunk * chunk))
        if len(parts) == 1:
            return query.cross(parts[0], points)[..., 0, 0]
        # Into one tensor: small ones would settle where the rows of a part were, and memory grow by a part each.
        h = query.leverage[points, 0, 0]
        found, start = h.new_empty(len(h), len(self.e) if rows is None else len(rows)), 0
        for part in parts:
            c = query.cross(part, points)[..., 0, 0]
            found[:, start : start + c.shape[1]] = c
            start += c.shape[1]
        return found

    # Outputs that share parameters

    def _coupled(self, query: Query) -> list[tuple[Tensor, Tensor]]:
        """Both kinds of changepoint of each output, (m, N) each; one and the same tensor where they are equal."""
        m, (N, O) = len(query.leverage), self.e.shape
        lower = self.e.new_empty(O, m, N)
        upper = lower
        for rows in self.features.slices():
            low, up = signed_changepoints_blocks(
                self.score, self.e[rows], self.slack[rows], query.cross(rows), query.leverage
            )
            if up is not low and upper is lower:
                upper = lower.clone()
            lower[:, :, rows] = low.permute(2, 0, 1)
            if upper is not lower:
                upper[:, :, rows] = up.permute(2, 0, 1)
        pairs = zip(lower, upper, strict=True)
        return [(low, low if upper is lower else up) for low, up in pairs]
