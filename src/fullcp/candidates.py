"""Full conformal prediction over a grid of candidate labels: from N + 1 residuals a candidate to p-values, sets, hulls.

For methods that try candidates one by one, most of them because their scores are no lines in the label. With N
training rows, K candidates and m test points:

    tails = count_tails(train, new, "absolute")  # (T, m, K), from residuals (m, K, N) and (m, K)
    p = p_values(tails, N)                       # (m, K)
    member = accepted(tails, N, level)           # (m, K)
    member = or_the_best(member, tails, r)       # none of them empty
    sets = [runs(grid, row) for row in member]   # intervals between neighbouring accepted candidates
    ends = hulls(grid, member)                   # (m, 2), the smallest and the largest accepted candidate

Where it is known on which labels each comparison holds, `count_intervals` has the tails of all candidates at once.
There are T = 1 tails for absolute residuals and T = 2 for signed ones. Tails over parts of the training rows add up.
"""

from __future__ import annotations

from fractions import Fraction
from math import floor
from numbers import Integral

import torch
from torch import Tensor

from fullcp.inputs import check_positive_int, read_candidates
from fullcp.regions import Interval


def grid_over(candidates: object, y: Tensor) -> Tensor:
    """The candidate labels (K,), float64 in order: as many as said over the range of y (N,), or those given."""
    if not isinstance(candidates, Integral):
        return read_candidates(candidates).to(y.device)
    count = check_positive_int("candidates", candidates, least=2)
    low, high = y.min().item(), y.max().item()
    if low == high:
        raise ValueError(f"y has no range for candidates to lie in, it is {low:.6g} everywhere: pass candidates")
    return torch.linspace(low, high, count, dtype=torch.float64, device=y.device)


def count_tails(train: Tensor, new: Tensor, residuals: str) -> Tensor:
    """How many training rows score at least as high as the new one; for signed residuals also how many at most.

    Parameters
    ----------
    train : Tensor (..., N)
        Residuals y_i - f_i of the training rows.
    new : Tensor (...)
        That of the new one.
    residuals : "absolute" or "signed"

    Returns
    -------
    Tensor (T, ...)
        Whole numbers from 0 to N.
    """
    new = new.unsqueeze(-1)
    if residuals == "absolute":
        return (train.abs() >= new.abs()).sum(-1).unsqueeze(0)
    return torch.stack([(train >= new).sum(-1), (train <= new).sum(-1)])


def count_intervals(left: Tensor, right: Tensor, r: Tensor) -> Tensor:
    """How many of the closed intervals [left, right] hold each candidate.

    Candidates are searched for the ends, n log K steps, instead of compared, n K. Counts over parts of the intervals
    add up.

    Parameters
    ----------
    left, right : Tensor (m, n)
        Ends may be infinite. left > right stands for two rays, (-inf, right] and [left, inf), and left = right = inf
        for nothing.
    r : Tensor (m, K)
        Candidates, in order along each row.

    Returns
    -------
    Tensor (m, K)
        Whole numbers from 0 to n.

    Examples
    --------
    >>> left, right = torch.tensor([[-1.0, 2.0, 2.0]]), torch.tensor([[1.0, 2.0, 0.0]])
    >>> count_intervals(left, right, torch.tensor([[-1.0, 1.0, 1.5, 2.0]])).tolist()
    [[2, 1, 0, 2]]
    """
    r = r.contiguous()
    change = torch.zeros(len(r), r.shape[1] + 1, dtype=torch.long, device=r.device)
    one = torch.ones((), dtype=torch.long, device=r.device).expand(left.shape)
    change.scatter_add_(1, torch.searchsorted(r, left), one)  # counts from here on
    change.scatter_add_(1, torch.searchsorted(r, right, right=True), -one)  # no longer counts from here on
    rays = (left > right).sum(1, keepdim=True)
    return change[:, :-1].cumsum(1).add_(rays)


def p_values(tails: Tensor, count: int) -> Tensor:
    """T (1 + the smaller tail) / (N + 1), at most 1, for tails (T, ...) out of N = `count` training rows: (...).

    Examples
    --------
    >>> p_values(torch.tensor([[0, 4, 9]]), 9).tolist()
    [0.1, 0.5, 1.0]
    """
    return (len(tails) * (1 + tails.amin(0)).double() / (count + 1)).clamp(max=1.0)


def accepted(tails: Tensor, count: int, level: Fraction) -> Tensor:
    """Which candidates have a p-value above 1 - level, told by whole numbers: (...)."""
    return tails.amin(0) >= floor((1 - level) * (count + 1) / len(tails))


def or_the_best(member: Tensor, tails: Tensor, r: Tensor) -> Tensor:
    """Accepted candidates; of a test point that has none, the nearest of those with the largest p-value.

    It belongs to every set that is not empty, so that sets stay nested.

    Parameters
    ----------
    member : Tensor (m, K)
    tails : Tensor (T, m, K)
    r : Tensor (m, K)
        The candidates relative to the prediction.
    """
    fewest = tails.amin(0)
    best = r.abs().masked_fill(fewest < fewest.amax(1, keepdim=True), float("inf")).argmin(1, keepdim=True)
    only = torch.zeros_like(member).scatter_(1, best, True)
    return torch.where(member.any(1, keepdim=True), member, only)


def runs(grid: Tensor, member: Tensor) -> list[Interval]:
    """Runs of neighbouring accepted candidates as closed intervals, in order; member (K,).

    Examples
    --------
    >>> runs(torch.tensor([0.0, 1.0, 2.0, 3.0]), torch.tensor([True, True, False, True]))
    [(0.0, 1.0), (3.0, 3.0)]
    """
    padded = torch.zeros(len(member) + 2, dtype=torch.int8)
    padded[1:-1] = member
    edges = padded.diff()  # 1 where a run starts, -1 behind its end
    starts, ends = (edges == 1).nonzero()[:, 0], (edges == -1).nonzero()[:, 0] - 1
    labels = grid.tolist()
    return [(labels[first], labels[last]) for first, last in zip(starts.tolist(), ends.tolist(), strict=True)]


def hulls(grid: Tensor, member: Tensor) -> Tensor:
    """The smallest and the largest accepted candidate of each row of member (m, K), none of them empty: (m, 2)."""
    first = member.int().argmax(1)
    last = len(grid) - 1 - member.flip(1).int().argmax(1)
    return torch.stack([grid[first], grid[last]], dim=1)
