"""Joint rectangles for several outputs: points are scored by the largest of their scaled residuals (docs/theory.md).

The scales sigma_o are fixed before any calibration row is looked at. A test point scores max_o |r_o| / unit_o, where
unit_o, its half-width at score 1, knows the method: sigma_o times the normaliser (split methods), sigma_o / b_o (full
ones). Row i scores at least t for some label of score t only where t <= T_i, so the rectangle of half-widths t* unit_o,
t* the k-th smallest T_i and k = ceil((1 - alpha)(N + 1)), holds the conformal set. For split methods, it is that set.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from fullcp.curvature import Query
from fullcp.engine import Engine
from fullcp.grouping import groups_by_label, groups_by_rank
from fullcp.influence import own_weight, signed_changepoints
from fullcp.memory import rows_within
from fullcp.regions import absolute_rank, order_statistics

_ROOM = 1e-9  # for rounding, as a share of a score: products of another shape, and another order of divisions
_COUPLED = 1e-9  # off-diagonal entries of leverages, as a share of their size: above, they are more than rounding


@dataclass(frozen=True)
class JointScores:
    """What rectangles for m test points are made of.

    Attributes
    ----------
    rows : Tensor (1, N) or (m, N)
        T_i, up to which score of the test point's label row i scores as high.
    unit : Tensor (m, O)
        Half-widths of the rectangle of score 1.
    """

    rows: Tensor
    unit: Tensor

    def half_widths(self, levels: list[Fraction]) -> Tensor:
        """Half-widths of the rectangles, (m, L, O)."""
        ranks = [absolute_rank(level, self.rows.shape[1]) for level in levels]
        return order_statistics(self.rows.clone(), ranks).unsqueeze(2) * self.unit.unsqueeze(1)

    def p_values(self, f: Tensor, y: Tensor) -> Tensor:
        """(1 + #{i : T_i >= score}) / (N + 1) for labels y (m, O) where f (m, O) is predicted: (m, 1).

        A label is in the rectangle of level 1 - alpha where that exceeds alpha, and so are those within rounding of it.
        """
        score = _score_of_labels(f, y, self.unit)
        return (1 + (self.rows >= score).sum(1, keepdim=True)).double() / (self.rows.shape[1] + 1)


def split_scores(e: Tensor, normaliser: Tensor, at: Tensor, scales: Tensor) -> JointScores:
    """For split methods: T_i = max_o |e_io| / (n_io sigma_o).

    Parameters
    ----------
    e, normaliser : Tensor (N, O)
        Calibration residuals and their normalisers.
    at : Tensor (m, O)
        Normalisers of the test points.
    scales : Tensor (O,)
    """
    return JointScores((e.abs() / (normaliser * scales)).amax(1).unsqueeze(0), at * scales)


def full_scores(engine: Engine, phi: Tensor, scales: Tensor) -> JointScores | PrunedScores:
    """For full methods whose curvature does not couple outputs: T_i = max_o |A_io| / (1 - |B_io| / b_o) / sigma_o.

    |A_io| / (b_o - |B_io|) is where the scores of row i and the new one tie if the label lies on the worse side, a
    changepoint of the size |e_io| with the cross leverage -|c_io|.

    Parameters
    ----------
    engine : what full conformal prediction knows of the training rows.
    phi : Tensor (m, O, D), or what the curvature asks for instead
    scales : Tensor (O,)

    Raises
    ------
    ValueError
        Where leverages have entries off the diagonal.
    """
    query = engine.query(phi)
    check_uncoupled(engine.slack, 1.0)
    if engine.prunes and query.of_one is not None:
        return PrunedScores(engine, query.of_one, scales)
    V, e = query.leverage, engine.e
    h, s = _diagonal(V), _diagonal(engine.slack)
    unit, most_h = scales / own_weight(engine.score, h), float(h.amax())
    check_uncoupled(V, most_h)
    T = h.new_zeros(len(h), len(e))
    most = rows_within(engine.memory // 4, 8 * 8 * max(len(h), 1) * h.shape[1] ** 2, at_most=len(e))
    for piece in engine.features.slices():
        for start in range(piece.start, piece.stop, most):
            rows = slice(start, min(start + most, piece.stop))
            C = query.cross(rows)  # (m, n, O, O)
            check_uncoupled(C, most_h**0.5)  # |c_i| <= sqrt(h_i h)
            T[:, rows] = _largest_ties(engine.score, e[rows], s[rows], _diagonal(C), h, unit)
    return JointScores(T, unit)


def _largest_ties(score: str, e: Tensor, s: Tensor, c: Tensor, h: Tensor, unit: Tensor) -> Tensor:
    """T_i (m, n) from e, s (n, O), c (m, n, O) and h, unit (m, O)."""
    T = c.new_zeros(c.shape[:2])
    for o in range(e.shape[1]):
        tie = signed_changepoints(score, e[:, o].abs(), s[:, o], -c[:, :, o].abs(), h[:, o])[1]
        torch.maximum(T, tie.div_(unit[:, o, None]), out=T)
    return T


class PrunedScores:
    """The same rectangles and p-values where outputs have one leverage in common, from the rows that can matter.

    With h_io = h_i and c_io = c_i the largest tie is that of the largest |e_io| / sigma_o: T_i / (b (1 + h)) is a
    changepoint r_i / (1 + h) of that residual, of which rows are left out by the bounds of `fullcp.pruning`.

    Parameters
    ----------
    engine : one that prunes.
    query : what the curvature knows of one output of the m test points.
    scales : Tensor (O,)
    """

    def __init__(self, engine: Engine, query: Query, scales: Tensor):
        self.engine, self.query = engine, query
        self.h = query.leverage[:, 0, 0]
        self.weight = own_weight(engine.score, self.h)
        self.unit = scales / self.weight.unsqueeze(1)  # (m, O)
        self.sorted = engine.sorted_by(tuple(scales.tolist()), lambda: (engine.e.abs() / scales).amax(1))

    def half_widths(self, levels: list[Fraction]) -> Tensor:
        """See `JointScores`."""
        N = len(self.engine.e)
        ranks = [absolute_rank(level, N) for level in levels]
        wanted = sorted(set(ranks) - {N + 1})
        found = self.h.new_full((len(self.h), len(ranks)), float("inf"))
        for points, window in groups_by_rank(self.sorted, self.h, wanted, self.engine.memory // 8) if wanted else ():
            rows = None if window is None else window.rows
            places = wanted if window is None else window.ranks(wanted)
            inside = {N + 1: (N if rows is None else len(rows)) + 1, **dict(zip(wanted, places, strict=True))}
            for some in self.engine.parts(points, rows):
                found[some] = order_statistics(self._ties(some, rows), [inside[k] for k in ranks])
        return found.unsqueeze(2) * self.unit.unsqueeze(1)

    def p_values(self, f: Tensor, y: Tensor) -> Tensor:
        """See `JointScores`."""
        N, score = len(self.engine.e), _score_of_labels(f, y, self.unit)[:, 0]
        z, p = score / (self.weight * (1 + self.h)), torch.empty_like(score)
        room = _ROOM * z.abs()
        width, memory = self.engine.features.size, self.engine.memory // 8
        for points, around in groups_by_label(self.sorted, self.h, z - room, z + room, width, memory):
            rows = None if around is None else around.rows
            for some in self.engine.parts(torch.arange(len(points), device=points.device), rows):
                at = points[some]
                beyond = (self._ties(at, rows) >= score[at].unsqueeze(1)).sum(1)
                p[at] = (1 + beyond + (0 if around is None else around.others(some, N)[1])).double() / (N + 1)
        return p.unsqueeze(1)

    def _ties(self, points: Tensor, rows: Tensor | None) -> Tensor:
        """T_i of some points and rows (None: all)."""
        e, s = self.engine.e, _diagonal(self.engine.slack)
        e, s = (e, s) if rows is None else (e[rows], s[rows])
        c = self.engine.cross(self.query, points, rows).unsqueeze(2).expand(-1, -1, e.shape[1])
        h = self.h[points].unsqueeze(1).expand(-1, e.shape[1])
        return _largest_ties(self.engine.score, e, s, c, h, self.unit[points])


def _score_of_labels(f: Tensor, y: Tensor, unit: Tensor) -> Tensor:
    """max_o |y_o - f_o| / unit_o, (m, 1), less what rounding may add."""
    room = 4 * torch.finfo(y.dtype).eps * (y.abs() + f.abs())
    return (((y - f).abs() - room) / unit).amax(1, keepdim=True)


def read_scales(scales: object, outputs: int, device: torch.device) -> Tensor:
    """The user's scales, one positive number for all outputs or one each: float64 (O,). None is 1."""
    try:
        values = torch.as_tensor(1.0 if scales is None else scales, dtype=torch.float64, device=device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"scales must be a positive number or one an output, got {scales!r}") from error
    if values.ndim > 1 or (values.ndim == 1 and len(values) != outputs):
        raise ValueError(f"scales must be one number or {outputs}, one an output, got shape {tuple(values.shape)}")
    if not bool(((values > 0) & values.isfinite()).all()):
        raise ValueError(f"scales must be positive and finite, got {scales!r}")
    return values.expand(outputs)


def _diagonal(blocks: Tensor) -> Tensor:
    return blocks.diagonal(dim1=-2, dim2=-1)


def check_uncoupled(blocks: Tensor, scale: float) -> None:
    """Refuse leverages (..., O, O) of size `scale` with which an output's residuals depend on the other labels."""
    off = blocks - torch.diag_embed(_diagonal(blocks))
    if bool((off.abs() > _COUPLED * scale).any()):
        raise ValueError(
            "joint='max' needs curvature in which outputs share no parameter, this one couples them: use "
            "curvature='last_layer', joint='bonferroni', or a split method, such as NormalizedSplitConformalRegressor"
        )
