"""Which training rows can be a wanted order statistic at all: bounds from leverages discard most of them, exactly.

A changepoint lies between bounds that need no cross leverage (`influence.changepoint_bounds`). With v the k-th smallest
lower bound and w the k-th smallest upper bound, the k-th smallest changepoint lies in [v, w]. A row whose upper bound
is less than v is below it, one whose lower bound is more than w is above it, and neither can be it. Rows are sorted so
that blocks of them have narrow bounds: blocks are looked at first, rows of the blocks that remain next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from fullcp.influence import changepoint_bounds
from fullcp.memory import rows_within

_BLOCK = 64  # rows in a block, at the least: the more rows, the larger, so that there are some sqrt(N) blocks
_STRATA = (0.5, 0.8, 0.95, 0.99)  # rows of like leverages are together: one large leverage widens a block's bounds

Thresholds = Callable[[Tensor, Tensor, Tensor | None, Tensor], tuple[Tensor, Tensor]]
_ARRAYS = 20  # of test groups x rows at a time


@dataclass(frozen=True)
class Window:
    """What remains of N rows for some order statistics.

    Attributes
    ----------
    rows : Tensor (S,)
        Indices of the rows that remain.
    below : list of int
        For each rank, how many of the rows left out lie below it; the others lie above.
    """

    rows: Tensor
    below: list[int]

    def ranks(self, ranks: list[int]) -> list[int]:
        """The ranks among the rows that remain."""
        return [k - gone for k, gone in zip(ranks, self.below, strict=True)]


@dataclass(frozen=True)
class Surroundings:
    """What remains of N rows for some labels.

    Attributes
    ----------
    rows : Tensor (S,)
        Indices of the rows that remain.
    below : Tensor (G,)
        How many of the rows left out lie below each label; the others lie above.
    """

    rows: Tensor
    below: Tensor

    def others(self, labels: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """How many of `count` rows are left out below some of the labels, by their indices, and how many above."""
        below = self.below[labels]
        return below, count - len(self.rows) - below


class SortedRows:
    """Training rows in blocks of like leverage and like residual.

    Parameters
    ----------
    score : "standard", "deleted" or "studentized"
    e : Tensor (N,)
        Residuals; for absolute ones, their sizes.
    s : Tensor (N,)
        Slack 1 - h_i.
    """

    def __init__(self, score: str, e: Tensor, s: Tensor):
        self.score, self.device = score, e.device
        residuals, slack = e.cpu().numpy(), s.cpu().numpy()
        N = len(residuals)
        self.block = max(_BLOCK, 2 ** round(np.log2(np.sqrt(N) / 4)))
        by_leverage = np.argsort(-slack, kind="stable")
        edges = [0, *sorted({int(share * N) for share in _STRATA} - {0, N}), N]
        strata = [by_leverage[a:b] for a, b in pairwise(edges)]
        order = np.concatenate([rows[np.argsort(residuals[rows], kind="stable")] for rows in strata])
        starts = np.concatenate([np.arange(a, b, self.block) for a, b in pairwise(edges)])
        ends = np.append(starts[1:], N)
        at = np.append(starts, N)[:-1]

        def there(values: np.ndarray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)

        self.order = there(order)  # indices of the rows, stratum after stratum
        self.e, self.s = there(residuals[order]), there(slack[order])
        self.starts, self.counts = there(starts), there(ends - starts)
        self.block_e = there(residuals[order][starts]), there(residuals[order][ends - 1])
        self.block_s = there(np.minimum.reduceat(slack[order], at)), there(np.maximum.reduceat(slack[order], at))

    def windows(self, leverages: list[tuple[float, float]], ranks: list[int], memory: int) -> Iterator[Window]:
        """The window of each group of test points, given the least and the largest leverage of each."""
        if self.device.type == "cuda":
            yield from self.windows_at_once(leverages, ranks, memory)
        else:
            yield from (self.window(low, high, ranks) for low, high in leverages)

    def windows_at_once(self, leverages: list[tuple[float, float]], ranks: list[int], memory: int) -> Iterator[Window]:
        """The same from all rows for many groups together: on a GPU, a round trip takes longer than that."""
        size = rows_within(memory, _ARRAYS * 8 * len(self.e), at_most=len(leverages))
        wanted = torch.tensor(ranks, device=self.device)
        for start in range(0, len(leverages), size):
            h = torch.tensor(leverages[start : start + size], dtype=self.e.dtype, device=self.device)
            bounds = changepoint_bounds(self.score, (self.e, self.e), (self.s, self.s), (h[:, :1], h[:, 1:]))
            inside, below = _those_within_each(*bounds, wanted)
            found = torch.cat([inside.sum(1, keepdim=True), below], dim=1).tolist()
            rows = self.order[inside.nonzero()[:, 1]]
            for part, (_, *gone) in zip(torch.split(rows, [count for count, *_ in found]), found, strict=True):
                yield Window(part, gone)

    def window(self, low: float, high: float, ranks: list[int]) -> Window:
        """The rows that can have one of the ranks (1 to N) at a test point of leverage in [low, high]."""
        wanted = torch.tensor(ranks, device=self.device)

        def thresholds(low: Tensor, high: Tensor, counts: Tensor | None, below: Tensor) -> tuple[Tensor, Tensor]:
            return _kth(low, counts, wanted - below), _kth(high, counts, wanted - below)

        return self._window((low, high), thresholds, len(ranks))

    def around(self, leverages: Tensor, least: Tensor, most: Tensor, memory: int) -> list[Surroundings]:
        """For each of g groups of labels the rows whose changepoints r_i / (1 + h) can lie on one of them.

        All groups are looked at together, blocks and then rows: a round trip or two to a GPU, whatever their number.

        Parameters
        ----------
        leverages : Tensor (g, 2)
            Least and largest of each group.
        least, most : Tensor (g, G)
            The G labels of each group, as the ranges that they may be anywhere in, in ascending order both.
        """
        h, (g, G) = leverages.unsqueeze(2).unbind(1), least.shape
        # Of rows left out, those above p labels and below the others, p = 0 to G.
        left_out = torch.zeros(g, G + 1, dtype=torch.long, device=self.device)
        remaining = []
        for part in _parts(g, memory, _ARRAYS * 8 * len(self.starts)):
            bounds = changepoint_bounds(self.score, self.block_e, self.block_s, (h[0][part], h[1][part]))
            inside, above = _those_around(*bounds, least[part], most[part])
            left_out[part].scatter_add_(1, above, self.counts * ~inside)
            remaining.append(inside.nonzero() + torch.tensor([part.start, 0], device=self.device))
        groups, blocks = torch.cat(remaining).unbind(1)
        offset = torch.arange(self.block, device=self.device)
        sizes, found = torch.zeros(g, dtype=torch.long, device=self.device), [self.order[:0]]
        for part in _parts(len(groups), memory, _ARRAYS * 8 * self.block):
            group, block = groups[part], blocks[part]
            there = offset < self.counts[block].unsqueeze(1)  # (n, block): the last block of a stratum is short
            rows = (self.starts[block].unsqueeze(1) + offset).clamp_(max=len(self.order) - 1)
            e, s = self.e[rows], self.s[rows]
            bounds = changepoint_bounds(self.score, (e, e), (s, s), (h[0][group], h[1][group]))
            inside, above = _those_around(*bounds, least[group], most[group])
            at = (above + (G + 1) * group.unsqueeze(1)).flatten()
            left_out.view(-1).index_add_(0, at, (there & ~inside).flatten().long())
            inside &= there
            sizes.index_add_(0, group, inside.sum(1))
            found.append(self.order[rows[inside]])
        parts = torch.split(torch.cat(found), sizes.tolist())
        return [Surroundings(*pair) for pair in zip(parts, left_out.cumsum(1)[:, :-1], strict=True)]

    def _window(self, leverages: tuple[float, float], thresholds: Thresholds, count: int) -> Window:
        """What remains between thresholds v and w, (K,), of blocks and then of their rows."""
        h = self.e.new_tensor(leverages[0]), self.e.new_tensor(leverages[1])
        below = torch.zeros(count, dtype=torch.long, device=self.device)
        bounds = changepoint_bounds(self.score, self.block_e, self.block_s, h)
        inside, gone = _those_between(*bounds, self.counts, *thresholds(*bounds, self.counts, below))
        below += gone
        starts, counts = self.starts[inside], self.counts[inside]
        at = (starts.unsqueeze(1) + torch.arange(self.block, device=self.device)).flatten()
        if bool((counts < self.block).any()):
            at = at[(torch.arange(self.block, device=self.device) < counts.unsqueeze(1)).flatten()]
        e, s = self.e[at], self.s[at]
        bounds = changepoint_bounds(self.score, (e, e), (s, s), h)
        inside, gone = _those_between(*bounds, None, *thresholds(*bounds, None, below))
        below += gone
        return Window(self.order[at[inside]], below.tolist())


def _parts(count: int, memory: int, bytes_each: int) -> list[slice]:
    size = rows_within(memory, bytes_each, at_most=max(1, count))
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _those_around(low: Tensor, high: Tensor, least: Tensor, most: Tensor) -> tuple[Tensor, Tensor]:
    """Which entries can lie on one of G labels, and how many labels each may lie above, (n, k) both.

    An entry that can lie on none lies above those labels that it may lie above, and below the others.

    Parameters
    ----------
    low, high : Tensor (n, k)
        Bounds of each entry.
    least, most : Tensor (n, G)
        Labels, in ascending order.
    """
    above = torch.searchsorted(least, high, right=True)
    highest = most.gather(1, (above - 1).clamp_(min=0))  # of the labels it may lie above, the one to lie on if any
    return (above > 0) & (low <= highest), above


def _those_between(low: Tensor, high: Tensor, counts: Tensor | None, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Which entries can lie between some thresholds, a mask (n,), and how many of the others lie below each, (K,).

    Parameters
    ----------
    low, high : Tensor (n,)
        Bounds of each entry.
    counts : how many rows an entry stands for; None is one.
    v, w : Tensor (K,)
    """
    beneath = high.unsqueeze(1) < v  # (n, K)
    inside = (~beneath & (low.unsqueeze(1) <= w)).any(1)
    left_out = beneath & ~inside.unsqueeze(1)
    gone = left_out.sum(0) if counts is None else (left_out * counts.unsqueeze(1)).sum(0)
    return inside, gone


def _those_within_each(low: Tensor, high: Tensor, ranks: Tensor) -> tuple[Tensor, Tensor]:
    """The same for several groups and their ranks, with bounds (g, n) of one row an entry: (g, n) and (g, K)."""
    v, w = (bounds.sort(1).values[:, ranks - 1].unsqueeze(1) for bounds in (low, high))  # (g, 1, K)
    inside = torch.zeros_like(low, dtype=torch.bool)
    for k in range(len(ranks)):
        inside |= (high >= v[..., k]) & (low <= w[..., k])
    gone = [((high < v[..., k]) & ~inside).sum(1) for k in range(len(ranks))]
    return inside, torch.stack(gone, dim=1)


def _kth(values: Tensor, counts: Tensor | None, ranks: Tensor) -> Tensor:
    """The smallest value that, with all smaller ones, stands for at least k rows, for each rank k: (K,)."""
    if counts is None:
        if values.device.type == "cpu":
            at = ranks - 1
            found = np.partition(values.numpy(), sorted(set(at.tolist())))
            return torch.from_numpy(found)[at]
        return values.sort().values[ranks - 1]
    order = values.argsort()
    return values[order][torch.searchsorted(counts[order].cumsum(0), ranks)]
