"""From changepoints to intervals, sets and p-values: ranks, order statistics and the exact sweep.

Ranks are exact integers: levels come as fractions. `need` is the number of training points that must score at least
as high as the new one for its label to belong to the set: N + 1 - k, the same as floor(alpha (N + 1)).
"""

from __future__ import annotations

from fractions import Fraction
from math import ceil, floor

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Interval = tuple[float, float]
Others = tuple[int, int] | tuple[Tensor, Tensor]
INF = float("inf")
_ROUNDING = 1e-11  # of a changepoint, relative to its size: cross leverages are sums of many products


def absolute_rank(level: Fraction, count: int) -> int:
    """The rank k = ceil((1 - alpha)(N + 1)); N + 1 means that no finite end exists.

    Examples
    --------
    >>> absolute_rank(Fraction(9, 10), 19), absolute_rank(Fraction(9, 10), 8)
    (18, 9)
    """
    return ceil(level * (count + 1))


def signed_ranks(level: Fraction, count: int) -> tuple[int, int]:
    """k_lo = floor((N + 1) alpha / 2) and k_hi = ceil((N + 1)(1 - alpha / 2)); 0 and N + 1 are infinite."""
    tail = (1 - level) / 2
    return floor((count + 1) * tail), ceil((count + 1) * (1 - tail))


def rows_needed(level: Fraction, residuals: str) -> int:
    """The smallest N for which the ends of an interval can be finite."""
    tail = 1 - level if residuals == "absolute" else (1 - level) / 2
    return ceil(1 / tail) - 1


def order_statistics(values: Tensor, ranks: list[int]) -> Tensor:
    """The k-th smallest of each row, for several k at once; k = 0 is -inf and k = N + 1 is inf.

    Parameters
    ----------
    values : Tensor (m, N)
        Reordered in place on the CPU.
    ranks : list of L ranks

    Returns
    -------
    Tensor (m, L)
    """
    m, N = values.shape
    inner = sorted({k for k in ranks if 1 <= k <= N})
    found = {0: values.new_full((m,), -INF), N + 1: values.new_full((m,), INF)}
    if inner:
        if values.device.type == "cpu":
            values.numpy().partition([k - 1 for k in inner], axis=1)
            found.update({k: values[:, k - 1] for k in inner})
        else:
            found.update({k: values.kthvalue(k, dim=1).values for k in inner})
    return torch.stack([found[k] for k in ranks], dim=1)


def signed_intervals(lower: Tensor, upper: Tensor, levels: list[Fraction]) -> Tensor:
    """Intervals of signed residuals from changepoints (m, N), relative to the prediction: (m, 2, L).

    The changepoints are reordered in place.
    """
    ranks = [signed_ranks(level, lower.shape[1]) for level in levels]
    return two_sided(lower, upper, [lo for lo, _ in ranks], [hi for _, hi in ranks])


def two_sided(lower: Tensor, upper: Tensor, low: list[int], high: list[int]) -> Tensor:
    """Order statistics of both kinds of changepoint (m, N), of L ranks each: (m, 2, L); they are reordered in place."""
    if lower is upper:
        return order_statistics(lower, low + high).view(len(lower), 2, len(low))
    return torch.stack([order_statistics(lower, low), order_statistics(upper, high)], dim=1)


def sweep(left: Tensor, right: Tensor, needs: list[int]) -> list[list[Interval]]:
    """The exact set {r : at least `need` of the S_i contain r} for each need, as disjoint closed intervals in order.

    Parameters
    ----------
    left, right : Tensor (N,)
        S_i is [left, right] where left <= right, else (-inf, right] and [left, inf).
    needs : list of int
        0 gives the whole line. The sets are closed and hold r = 0, so none is empty.
    """
    lo, hi = left.cpu().numpy(), right.cpu().numpy()
    rays = lo > hi
    starts = np.sort(np.concatenate([np.where(rays, -INF, lo), lo[rays]]))
    stops = np.sort(np.concatenate([hi, np.full(rays.sum(), INF)]))
    points = np.unique(np.concatenate([starts, stops]))
    points = points[np.isfinite(points)]
    begun = np.searchsorted(starts, points, side="right")
    # Counts alternate: before the first point, at it, between it and the next, ...
    counts = np.empty(2 * len(points) + 1, dtype=np.int64)
    counts[0] = np.searchsorted(starts, -INF, side="right")
    counts[1::2] = begun - np.searchsorted(stops, points, side="left")
    counts[2::2] = begun - np.searchsorted(stops, points, side="right")
    return [_runs(counts >= need, points) for need in needs]


def _runs(member: NDArray[np.bool_], points: NDArray[np.float64]) -> list[Interval]:
    """Consecutive members as intervals; entry 2 j + 1 is point j, even entries are the gaps around."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], member, [False]]).astype(np.int8)))
    ends = np.concatenate([[-INF], points, [INF]])
    # A closed set's run begins and ends at a point, or at infinity where it begins or ends with the outer gap.
    return [
        (float(ends[(first + 1) // 2]), float(ends[last // 2 + 1]))
        for first, last in zip(edges[::2], edges[1::2] - 1, strict=True)
    ]


def absolute_p_values(left: Tensor, right: Tensor, f: Tensor, y: Tensor, others: Others = (0, 0)) -> Tensor:
    """(1 + #{i : y - f in S_i}) / (N + 1) for candidates y (m,): the label belongs to the set where p > alpha.

    A label within rounding of an end belongs to the set: the same changepoint from other products differs by that.
    `others` are rows that are not among the changepoints: how many end before the label, and how many beyond it, for
    all labels or for each, (m,).
    """
    f, y, room = _columns_with_room(f, y)
    above, below = f + left <= y + room, y - room <= f + right
    inside = torch.where(left <= right, above & below, above | below)
    return (1 + others[1] + inside.sum(1)).double() / (left.shape[1] + others[0] + others[1] + 1)


def signed_p_values(lower: Tensor, upper: Tensor, f: Tensor, y: Tensor, others: Others = (0, 0)) -> Tensor:
    """2 (1 + min(#{r_i <= y - f}, #{r_i >= y - f})) / (N + 1), at most 1, for candidates y (m,)."""
    f, y, room = _columns_with_room(f, y)
    before, beyond = (f + lower <= y + room).sum(1) + others[0], (f + upper >= y - room).sum(1) + others[1]
    return (2 * (1 + torch.minimum(before, beyond)).double() / (lower.shape[1] + others[0] + others[1] + 1)).clamp(
        max=1.0
    )


def _columns_with_room(f: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Predictions, labels and what rounding may take, (m, 1) each."""
    return f.unsqueeze(1), y.unsqueeze(1), rounding_room(f, y).unsqueeze(1)


def rounding_room(f: Tensor, y: Tensor) -> Tensor:
    """How far from a label y a changepoint may lie and still count as on it."""
    return _ROUNDING * (y - f).abs() + 4 * torch.finfo(y.dtype).eps * (y.abs() + f.abs())


def bonferroni(level: Fraction, outputs: int) -> Fraction:
    """The level each of O outputs needs so that all hold at once with the given level: 1 - alpha / O."""
    return 1 - (1 - level) / outputs


def split_half_widths(e: Tensor, normaliser: Tensor, at: Tensor, levels: list[Fraction]) -> Tensor:
    """Half-widths of split conformal intervals: the k-th smallest of |e_i| / n_i, times the test point's normaliser.

    The division is done last, |e_(k)| (n / n_(k)), so that equal normalisers give plain split-CP to the last bit.

    Parameters
    ----------
    e, normaliser : Tensor (N,)
        Calibration residuals and their normalisers.
    at : Tensor (m,)
        Normalisers of the test points.

    Returns
    -------
    Tensor (m, L)
    """
    size = e.abs()
    order = size.argsort(stable=True)  # ties in the quotient are settled by |e|
    order = order[(size / normaliser)[order].argsort(stable=True)]
    return _scaled_order_statistics(
        size[order], normaliser[order], at, [absolute_rank(level, len(e)) for level in levels]
    )


def split_signed_intervals(e: Tensor, normaliser: Tensor, at: Tensor, levels: list[Fraction]) -> Tensor:
    """Ends of split conformal intervals from signed residuals, relative to the prediction: (m, 2, L)."""
    order = e.argsort(stable=True)
    order = order[(e / normaliser)[order].argsort(stable=True)]
    ranks = [signed_ranks(level, len(e)) for level in levels]
    low = _scaled_order_statistics(e[order], normaliser[order], at, [lo for lo, _ in ranks])
    return torch.stack([low, _scaled_order_statistics(e[order], normaliser[order], at, [hi for _, hi in ranks])], dim=1)


def _scaled_order_statistics(values: Tensor, normaliser: Tensor, at: Tensor, ranks: list[int]) -> Tensor:
    """values_(k) (at / normaliser_(k)) for sorted values, k = 0 and N + 1 infinite: (m, L)."""
    N = len(values)
    columns = [
        at.new_full(at.shape, -INF if k < 1 else INF) if k < 1 or k > N else values[k - 1] * (at / normaliser[k - 1])
        for k in ranks
    ]
    return torch.stack(columns, dim=1)


def split_p_values(e: Tensor, normaliser: Tensor, f: Tensor, y: Tensor, at: Tensor, residuals: str) -> Tensor:
    """p-values of candidates y (m,) with predictions f and normalisers `at`: the split like of the functions above.

    A label within rounding of a changepoint counts as on it, so that the ends of an interval belong to it.
    """
    N = len(e)
    new, old = (y - f) / at, (e / normaliser).sort().values
    room = 4 * torch.finfo(y.dtype).eps * (y.abs() + f.abs()) / at
    if residuals == "absolute":
        old = old.abs().sort().values
        return (1 + N - torch.searchsorted(old, new.abs() - room)).double() / (N + 1)
    fewer = torch.minimum(torch.searchsorted(old, new + room, right=True), N - torch.searchsorted(old, new - room))
    return (2 * (1 + fewer).double() / (N + 1)).clamp(max=1.0)
