"""Ranks, order statistics and sweeps against counting on a grid."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fullcp import regions

INF = float("inf")


@pytest.mark.parametrize(
    ("level", "N", "absolute", "signed"),
    [
        ("0.9", 19, 18, (1, 19)),
        ("0.9", 9, 9, (0, 10)),
        ("0.9", 8, 9, (0, 9)),
        ("0.95", 19, 19, (0, 20)),
        ("0.95", 39, 38, (1, 39)),
        ("0.99", 99, 99, (0, 100)),
        ("0.99", 98, 99, (0, 99)),
        ("0.55", 99, 55, (22, 78)),  # 0.55 * 100 is 55.000000000000007 in floating point
    ],
)
def test_ranks(level, N, absolute, signed):
    assert regions.absolute_rank(Fraction(level), N) == absolute
    assert regions.signed_ranks(Fraction(level), N) == signed


@pytest.mark.parametrize("residuals", ["absolute", "signed"])
@pytest.mark.parametrize("level", ["0.5", "0.8", "0.9", "0.95", "0.99", "0.999"])
def test_rows_needed_is_the_first_number_with_finite_ends(residuals, level):
    level = Fraction(level)
    N = regions.rows_needed(level, residuals)

    def finite(rows):
        if residuals == "absolute":
            return regions.absolute_rank(level, rows) <= rows
        low, high = regions.signed_ranks(level, rows)
        return low >= 1 and high <= rows

    assert finite(N)
    assert not finite(N - 1)


ends = st.one_of(st.integers(-4, 4).map(float), st.just(INF), st.just(-INF), st.floats(-3, 3))


@settings(max_examples=500)
@given(st.lists(st.tuples(ends, ends), min_size=1, max_size=9))
def test_sweep_equals_counting(pairs):
    """Ties, points, rays, lines and unions of rays; every set holds 0, as all sets here do."""
    pairs = [(a, b) if not (a == INF or b == -INF) and (a > b or a <= 0 <= b) else (-abs(a), abs(b)) for a, b in pairs]
    pairs = [(a, b) if a <= b or (b >= 0 or a <= 0) else (-abs(a), abs(b)) for a, b in pairs]
    left, right = (torch.tensor(column, dtype=torch.float64) for column in zip(*pairs, strict=True))
    points = np.unique([x for pair in pairs for x in pair if np.isfinite(x)] or [0.0])
    grid = np.unique(np.concatenate([points, (points[1:] + points[:-1]) / 2, [points[0] - 1, points[-1] + 1, 0.0]]))
    counts = np.array([sum((a <= x <= b) if a <= b else (x <= b or x >= a) for a, b in pairs) for x in grid])
    needs = list(range(len(pairs) + 1))
    for need, pieces in zip(needs, regions.sweep(left, right, needs), strict=True):
        inside = np.array([any(lo <= x <= hi for lo, hi in pieces) for x in grid])
        assert np.array_equal(inside, counts >= need)
        assert all(a[1] < b[0] for a, b in itertools.pairwise(pieces))
        if pieces:
            assert (counts[0] >= need) == (pieces[0][0] == -INF)
            assert (counts[-1] >= need) == (pieces[-1][1] == INF)


@settings(max_examples=200)
@given(st.integers(1, 30), st.integers(0, 10**6), st.lists(st.sampled_from(["0.1", "0.5", "0.8", "0.9", "0.99"])))
def test_intervals_equal_the_sweep(N, seed, more):
    """Two order statistics are the hull of the swept set where every point gives an interval around 0."""
    rng = np.random.default_rng(seed)
    levels = [Fraction(level) for level in ["0.7", *more]]
    right = torch.from_numpy(np.abs(rng.normal(size=(3, N))).round(1))
    left = -torch.from_numpy(np.abs(rng.normal(size=(3, N))).round(1))
    right[0, 0], left[1, 0] = INF, -INF
    high = [regions.absolute_rank(level, N) for level in levels]
    low = [N + 1 - k for k in high]
    expected = [regions.sweep(left[i], right[i], low) for i in range(3)]
    hulls = regions.two_sided(left.clone(), right.clone(), low, high)
    for i in range(3):
        for j in range(len(levels)):
            assert [tuple(hulls[i, :, j].tolist())] == expected[i][j]


def test_order_statistics_of_several_ranks():
    values = torch.randn(4, 11, dtype=torch.float64)
    values[0, 3] = INF
    expected = values.sort(1).values
    found = regions.order_statistics(values.clone(), [0, 5, 1, 11, 12, 5])
    assert (found[:, 0] == -INF).all()
    assert (found[:, 4] == INF).all()
    assert torch.equal(found[:, [2, 1, 3]], expected[:, [0, 4, 10]])


@settings(max_examples=200)
@given(st.integers(1, 25), st.integers(0, 10**6), st.sampled_from(["absolute", "signed"]))
def test_split_p_values_agree_with_the_intervals(N, seed, residuals):
    rng = np.random.default_rng(seed)
    e, n = torch.from_numpy(rng.normal(size=N).round(1)), torch.from_numpy(rng.uniform(0.5, 2, size=N))
    at = torch.from_numpy(rng.uniform(0.5, 2, size=40))
    r = torch.from_numpy(rng.normal(size=40) * 2)
    p = regions.split_p_values(e, n, torch.zeros(40).double(), r, at, residuals)
    for level in ("0.5", "0.8", "0.9"):
        level = Fraction(level)
        if residuals == "absolute":
            high = regions.split_half_widths(e, n, at, [level])[:, 0]
            low = -high
        else:
            low, high = regions.split_signed_intervals(e, n, at, [level])[..., 0].T
        assert torch.equal((low <= r) & (r <= high), p > float(1 - level) + 1e-12)


def test_ties_count_in_p_values():
    left, right = torch.tensor([[-2.0, -1.0, 3.0]]).double(), torch.tensor([[2.0, 1.0, -3.0]]).double()
    f = torch.ones(1).double()
    # The third point counts outside of (-3, 3) only.
    for r, expected in ((0.0, 3), (1.0, 3), (1.5, 2), (2.0, 2), (2.5, 1), (-3.0, 2), (3.0, 2)):
        assert regions.absolute_p_values(left, right, f, f + r).item() == expected / 4
    lower = torch.tensor([[-1.0, 0.0, 2.0]]).double()
    for r, expected in ((0.0, 1.0), (-1.0, 1.0), (-1.5, 0.5), (2.0, 1.0), (2.5, 0.5)):
        assert regions.signed_p_values(lower, lower, f, f + r).item() == expected
