"""The changepoints alone, on inputs that networks seldom give: ties, zeros, equal slopes, scores that do not exist."""

from __future__ import annotations

from decimal import Decimal, localcontext
from itertools import product

import numpy as np
import pytest
import torch

from fullcp.influence import (
    SCORES,
    absolute_changepoints,
    direct_changepoints,
    score_lines,
    signed_changepoints,
    signed_changepoints_blocks,
)

INF = float("inf")
GRID = torch.linspace(-40, 40, 641, dtype=torch.float64)  # steps of 1/8: exact


def column(*values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("score", SCORES)
def test_absolute_sets_are_where_the_scores_are_higher(score):
    """Quarters and small integers: all is exact, so that ends belong to the sets and equal slopes are met."""
    cases = list(product([0.0, 1.0, -1.0, 2.0], [0.0, 1.0, -1.0, 0.25, -0.25, 2.0, -2.0, 0.5], [0.25, 0.5, 0.75, 1.0]))
    e, c, s = (column(*values) for values in zip(*cases))
    h = column(3.0)
    left, right = absolute_changepoints(score, e, s, c[None], h)
    kinds = set()
    for i in range(len(cases)):
        A, B, b = score_lines(score, e[i : i + 1], s[i : i + 1], c[None, i : i + 1], h)
        gap = (A - B * GRID).abs() - b * GRID.abs()
        low, high = left[0, i], right[0, i]
        inside = (low <= GRID) & (high >= GRID) if low <= high else (high >= GRID) | (low <= GRID)
        clear = gap[0].abs() > 1e-12
        assert torch.equal(inside[clear], gap[0, clear] > 0), cases[i]
        assert inside[~clear].all(), cases[i]  # ties count
        kinds.add((bool(low > high), bool(low == -INF), bool(high == INF)))
    if score == "standard":  # intervals, unions of rays, both rays, lines
        assert kinds >= {(False, False, False), (True, False, False), (False, True, False), (False, False, True)}
        assert (False, True, True) in kinds


@pytest.mark.parametrize("score", SCORES)
def test_signed_changepoints_are_where_the_scores_meet(score):
    e, c, s = column(1.0, -2.0, 0.0, 1.0, 1.0), column(0.5, -0.5, 0.25, -1.0, -3.0), column(0.5, 0.25, 1.0, 0.5, 0.5)
    h = column(3.0)
    lower, upper = signed_changepoints(score, e, s, c[None], h)
    A, B, b = score_lines(score, e, s, c[None], h)
    for i in range(5):
        if b[0] + B[0, i] <= 0:
            assert (lower[0, i], upper[0, i]) == (-INF, INF)
        else:
            assert lower[0, i] == upper[0, i]
            torch.testing.assert_close(A[0, i] - B[0, i] * lower[0, i], b[0] * lower[0, i])
    assert (lower[0] == -INF).any() == (score == "standard")


@pytest.mark.parametrize("score", ["deleted", "studentized"])
@pytest.mark.parametrize("points", [absolute_changepoints, signed_changepoints])
def test_scores_that_do_not_exist_count_for_every_label(score, points):
    """Approximate curvature can give leverages of 1 and more: 1 - hbar = s + c^2 / (1 + h) <= 0."""
    s, c, h = column(-0.5, -0.5, 0.5, 0.0), column([0.1, 2.0, 0.1, 0.0]), column(1.0)
    lower, upper = points(score, column(1.0, 1.0, 1.0, 0.0), s, c, h)
    assert torch.equal(torch.isinf(lower[0]), torch.tensor([True, False, False, True]))
    assert torch.equal(torch.isinf(upper[0]), torch.tensor([True, False, False, True]))
    assert not lower.isnan().any()
    A, B, _ = score_lines(score, column(1.0, 1.0, 1.0, 0.0), s, c, h)
    assert torch.equal(A[0].isnan(), torch.tensor([True, False, False, True]))
    assert torch.equal(B[0].isnan(), A[0].isnan())


def digits(e, c, s, h):
    """Studentized changepoints of one row by 60 digits: the signed one, and the ends of the absolute set."""
    e, c, s, h = (Decimal(float(value)) for value in (e, c, s, h))
    P = ((1 + h) * s + c * c).sqrt()
    signed, t = e * (1 + h) / (P + c), c if e >= 0 else -c
    return [float(x) for x in (signed, -abs(e) * (1 + h) / (P - t), abs(e) * (1 + h) / (P + t))]


def test_changepoints_next_to_leverage_one_have_all_their_digits():
    """P + c is (1 + h) s / (P - c): 1e-12, say, of numbers about 1."""
    rng = np.random.default_rng(0)
    n = 400
    s = 10.0 ** rng.uniform(-16, 0, size=n)
    h = rng.uniform(0, 3, size=5)
    c = rng.choice([-1, 1], size=(5, n)) * np.sqrt((1 - s) * h[:, None]) * rng.choice([1.0, 0.9, 1e-3, 1e-9], size=n)
    e = rng.normal(size=n)
    e[:20] = 0.0  # never the whole line, however small P - |c| is
    given = [torch.from_numpy(a) for a in (e, s, c, h)]
    lower, upper = signed_changepoints("studentized", *given)
    left, right = absolute_changepoints("studentized", *given)
    assert torch.equal(lower, upper)
    with localcontext() as context:
        context.prec = 60
        expected = np.array([[digits(e[i], c[j, i], s[i], h[j]) for i in range(n)] for j in range(5)])
    for k, found in enumerate((lower, left, right)):
        np.testing.assert_allclose(found, expected[:, :, k], rtol=1e-12)


def test_slack_of_no_size_is_the_whole_line_on_the_worse_side():
    s, c, h = column(0.0, 0.0, -1e-3, -1e-3), column([0.5, -0.5, 0.5, -0.5]), column(1.0)
    lower, upper = signed_changepoints("studentized", column(1.0, 1.0, 1.0, 1.0), s, c, h)
    assert lower[0, 1] == lower[0, 3] == -INF
    assert upper[0, 1] == upper[0, 3] == INF
    assert lower[0, 0] == 2.0  # e (1 + h) / 2 c
    left, right = absolute_changepoints("studentized", column(1.0, 1.0, 0.0, 0.0), s, c, h)
    assert (left[0, 0], right[0, 0]) == (-INF, 2.0)
    assert (left[0, 1], right[0, 1]) == (-2.0, INF)
    assert left[0, 2:].isneginf().all()
    assert right[0, 2:].isposinf().all()


class TestBlocks:
    def test_positive_definite_means_the_symmetric_part(self):
        """A rotation by nearly half a turn has a positive determinant and eigenvalues that are not real."""
        turn = torch.tensor([[0.0, -3.0], [3.0, 0.0]], dtype=torch.float64)
        C = torch.stack([turn - 1.5 * torch.eye(2, dtype=torch.float64), turn])[None]  # B_new + B_i = I + C_i
        lower, upper = signed_changepoints_blocks(
            "standard",
            torch.ones(2, 2).double(),
            torch.eye(2).double().expand(2, 2, 2),
            C,
            torch.zeros(1, 2, 2).double(),
        )
        assert torch.linalg.det(torch.eye(2) + C).min() > 0
        assert (lower[0, 0] == -INF).all()
        assert (upper[0, 0] == INF).all()
        torch.testing.assert_close(
            lower[0, 1], torch.linalg.solve(torch.eye(2).double() + turn, torch.ones(2).double())
        )

    @pytest.mark.parametrize("score", ["deleted", "studentized"])
    def test_scores_that_do_not_exist(self, score):
        S = torch.diag(column(0.5, -0.5)).expand(1, 2, 2)
        lower, upper = signed_changepoints_blocks(
            score, torch.ones(1, 2).double(), S, torch.zeros(1, 1, 2, 2).double(), torch.eye(2).double()[None]
        )
        assert (lower == -INF).all()
        assert (upper == INF).all()

    @pytest.mark.parametrize("score", SCORES)
    def test_one_output_is_the_scalar_case(self, score):
        generator = torch.Generator().manual_seed(0)
        e, s = torch.randn(7, generator=generator).double(), torch.rand(7, generator=generator).double()
        c, h = torch.randn(3, 7, generator=generator).double() / 3, torch.rand(3, generator=generator).double()
        blocks = signed_changepoints_blocks(score, e[:, None], s[:, None, None], c[..., None, None], h[:, None, None])
        for found, expected in zip(blocks, signed_changepoints(score, e, s, c, h)):
            torch.testing.assert_close(found[..., 0], expected)


@pytest.mark.parametrize("h", [0.5, 1.0, 1.5])
def test_direct_sets_are_where_the_lines_are_higher(h):
    """Slopes of either sign and none, residuals of 0: all is exact but ends that are no grid points anyway."""
    cases = list(product([0.0, 1.0, -1.0, 2.5], [0.0, 0.25, -0.25, 0.5, -0.5, 1.0, -1.0]))
    e, c = (column(*values) for values in zip(*cases))
    train, new = e[:, None] - c[:, None] * GRID, (1 - h) * GRID
    at_least, at_most = direct_changepoints("signed", e, c[None], column(h))
    (size,) = direct_changepoints("absolute", e, c[None], column(h))
    for (left, right), expected in (
        (at_least, train >= new),
        (at_most, train <= new),
        (size, train.abs() >= new.abs()),
    ):
        left, right = left[0, :, None], right[0, :, None]
        above, below = left <= GRID, right >= GRID
        assert torch.equal(torch.where(left <= right, above & below, above | below), expected)
