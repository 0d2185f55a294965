"""Tails, p-values, runs and hulls on a grid of candidate labels, by hand."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from fullcp.candidates import accepted, count_intervals, count_tails, hulls, or_the_best, p_values, runs
from fullcp.inputs import read_levels


def test_tails_and_p_values():
    train, new = torch.tensor([[-3.0, 1.0, 2.0, 2.0], [0.0, 0.0, 0.0, 0.0]]), torch.tensor([2.0, -1.0])
    assert count_tails(train, new, "absolute").tolist() == [[3, 0]]
    assert count_tails(train, new, "signed").tolist() == [[2, 4], [4, 0]]
    assert p_values(count_tails(train, new, "absolute"), 4).tolist() == [0.8, 0.2]
    assert p_values(count_tails(train, new, "signed"), 4).tolist() == [1.0, 0.4]


def test_counts_of_intervals_are_those_of_comparisons():
    """Ends of small integers meet candidates and each other; intervals, rays, lines, nothing."""
    generator = torch.Generator().manual_seed(0)
    inf = float("inf")
    ends = torch.tensor([-inf, -2.0, -1.0, 0.0, 1.0, 2.0, inf])
    left, right = ends[torch.randint(7, (2, 4, 500), generator=generator)]
    r = torch.randint(-3, 4, (4, 9), generator=generator).float().sort(1).values  # with repeats
    above, below = left[:, :, None] <= r[:, None], r[:, None] <= right[:, :, None]
    held = torch.where((left <= right)[:, :, None], above & below, above | below)
    assert torch.equal(count_intervals(left, right, r), held.sum(1))
    parts = [
        count_intervals(left[:, rows].contiguous(), right[:, rows].contiguous(), r)
        for rows in (slice(7), slice(7, 7), slice(7, 500))
    ]
    assert torch.equal(sum(parts), held.sum(1))


@pytest.mark.parametrize("residuals", ["absolute", "signed"])
def test_acceptance_is_p_above_alpha_without_rounding(residuals):
    for N in (9, 19, 99):
        tails = torch.arange(N + 1).repeat(1 if residuals == "absolute" else 2, 1)
        for level in read_levels([0.5, 0.8, 0.9, 0.95, 0.99]):
            exact = [Fraction(len(tails) * (1 + c), N + 1) > 1 - level for c in range(N + 1)]
            assert accepted(tails, N, level).tolist() == exact


def test_runs_hulls_and_empty_sets():
    grid = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0])
    member = torch.tensor([[1, 0, 1, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]]).bool()
    tails = torch.tensor([[[5, 1, 5, 5, 1], [1, 2, 0, 2, 1], [5, 5, 5, 5, 5]]])
    r = grid - torch.tensor([[0.0], [2.6], [0.0]])
    filled = or_the_best(member, tails, r)
    assert [runs(grid, row) for row in filled] == [[(0.0, 0.0), (2.0, 3.0)], [(3.0, 3.0)], [(0.0, 4.0)]]
    assert runs(grid, member[1]) == []
    assert hulls(grid, filled).tolist() == [[0.0, 3.0], [3.0, 3.0], [0.0, 4.0]]
