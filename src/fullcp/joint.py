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
from fullcp.features import FeatureRows
from fullcp.influence import signed_changepoints
from fullcp.inputs import check_all_finite
from fullcp.memory import rows_within
from fullcp.regions import absolute_rank, order_statistics

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
        room = 4 * torch.finfo(y.dtype).eps * (y.abs() + f.abs())
        score = (((y - f).abs() - room) / self.unit).amax(1, keepdim=True)
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


def full_scores(
    score: str, e: Tensor, slack: Tensor, query: Query, features: FeatureRows, scales: Tensor, memory: int
) -> JointScores:
    """For full methods whose curvature does not couple outputs: T_i = max_o |A_io| / (1 - |B_io| / b_o) / sigma_o.

    |A_io| / (b_o - |B_io|) is where the scores of row i and the new one tie if the label lies on the worse side, a
    changepoint of the size |e_io| with the cross leverage -|c_io|.

    Parameters
    ----------
    e, slack : Tensor (N, O), (N, O, O)
    query : leverages and cross leverages of m test points.
    features : the training rows.
    memory : budget in bytes for a block of test x train numbers.

    Raises
    ------
    ValueError
        Where leverages have entries off the diagonal.
    """
    V = query.leverage
    check_all_finite(None, {"leverages": V})
    check_uncoupled(slack, 1.0)
    h, s, size = _diagonal(V), _diagonal(slack), e.abs()
    b = {"standard": 1 / (1 + h), "deleted": torch.ones_like(h), "studentized": (1 + h).rsqrt()}[score]  # (m, O)
    unit, most_h = scales / b, float(h.amax())
    check_uncoupled(V, most_h)
    T = h.new_zeros(len(h), len(e))
    most = rows_within(memory, 8 * 8 * max(len(h), 1) * h.shape[1] ** 2, at_most=len(e))
    for piece in features.slices():
        for start in range(piece.start, piece.stop, most):
            rows = slice(start, min(start + most, piece.stop))
            C = query.cross(rows)  # (m, n, O, O)
            check_uncoupled(C, most_h**0.5)  # |c_i| <= sqrt(h_i h)
            for o, c in enumerate(_diagonal(C).abs().unbind(2)):
                tie = signed_changepoints(score, size[rows, o], s[rows, o], -c, h[:, o])[1]
                T[:, rows] = torch.maximum(T[:, rows], tie / unit[:, o, None])
    return JointScores(T, unit)


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
