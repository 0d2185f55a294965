"""Pruned prediction is the dense one: the same bits where cross leverages are, whatever the residuals and leverages."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from fractions import Fraction
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fullcp
from fullcp import engine as engine_module
from fullcp import grouping, pruning
from fullcp.curvature.base import EVERY, Query
from fullcp.engine import Engine
from fullcp.features import Jacobian
from fullcp.features.recent import RecentRows
from fullcp.influence import SCORES, absolute_changepoints, changepoint_bounds, signed_changepoints

RESIDUALS = ("absolute", "signed")
LEVELS = [Fraction(level) for level in ("1/10", "1/2", "8/10", "9/10", "99/100")]


class Dense:
    """A curvature all of whose leverages K (N + m, N + m) are at hand: any rows are had with the same bits."""

    independent = False
    selective = True

    def __init__(self, K, N):
        self.K, self.N, self.asked = K, N, 0

    def query(self, phi):
        V = self.K.diagonal()[self.N :].view(-1, 1, 1).clone()

        def cross(rows, points=EVERY):
            found = self.K[self.N :, : self.N][:, rows]
            self.asked += found.shape[1]
            return found[points][..., None, None].clone()

        return Query(V, cross)


class Rows:
    """What the engine asks of training rows."""

    jacobian = None

    def __init__(self, N, size):
        self.N, self.size, self.chunk = N, size, 7 if N < 100 else N

    def slices(self):
        return [slice(i, min(i + self.chunk, self.N)) for i in range(0, self.N, self.chunk)]


def made(seed, N, D, kind, tail):
    """Leverages of N rows and 9 test points, and residuals, of an unpleasant kind."""
    rng = np.random.default_rng(seed)
    phi = rng.standard_t(2, size=(N + 9, D)) if tail else rng.normal(size=(N + 9, D))
    if kind == "duplicates":
        phi[N : N + 4] = phi[rng.integers(N, size=4)]
        phi[: N // 2] = phi[rng.integers(N, size=N // 2)]
    if kind == "outliers":
        phi[:: max(1, N // 3)] *= 1e4  # leverages next to 1
        phi[N] *= 1e3
    H = phi[:N].T @ phi[:N] + 10.0 ** rng.integers(-3, 2) * np.eye(D)
    K = phi @ np.linalg.solve(H, phi.T)
    if kind == "approximate":
        K *= 1.7  # leverages of 1 and more: scores that do not exist, points that count for all labels, rays
    e = rng.standard_t(1.2, size=N) if tail else rng.normal(size=N)
    if kind == "ties":
        e = rng.integers(-1, 2, size=N).astype(float)
    return torch.from_numpy(K), torch.from_numpy(e)


def engines(K, e, score, residuals):
    """The dense engine and the pruned one, which takes windows of any size for what they are worth."""
    N = len(e)
    slack = (1 - K.diagonal()[:N]).view(-1, 1, 1)
    settings = {"score": score, "residuals": residuals, "memory": 10**8}
    with patch.object(engine_module, "points_within", lambda *arguments: 4096):
        with patch.object(engine_module, "_FEWEST_ROWS", 10**9):
            dense = Engine(Dense(K, N), Rows(N, 3), e.unsqueeze(1), slack, **settings)
        with patch.object(engine_module, "_FEWEST_ROWS", 1):
            pruned = Engine(Dense(K, N), Rows(N, 3), e.unsqueeze(1), slack, **settings)
    assert pruned.prunes
    assert not dense.prunes
    return dense, pruned


@settings(max_examples=60)
@given(
    st.integers(0, 10**6),
    st.integers(1, 50),
    st.integers(1, 6),
    st.sampled_from(["plain", "ties", "duplicates", "outliers", "approximate"]),
    st.booleans(),
    st.lists(st.sampled_from(LEVELS), min_size=1, max_size=4),
    st.integers(1, 9),
    st.integers(1, 9),
    st.booleans(),
    st.sampled_from([0, 1, 10]),
)
@pytest.mark.parametrize("residuals", RESIDUALS)
@pytest.mark.parametrize("score", SCORES)
def test_pruned_equals_dense(score, residuals, seed, N, D, kind, tail, levels, block, group, at_once, overhead):
    K, e = made(seed, N, D, kind, tail)
    with ExitStack() as stack:
        stack.enter_context(patch.object(pruning, "_BLOCK", block))
        stack.enter_context(patch.object(grouping, "_GROUP", {"cpu": group}))
        stack.enter_context(patch.object(grouping, "_LARGEST_SHARE", 2.0))
        if at_once:  # as on a GPU
            stack.enter_context(patch.object(pruning.SortedRows, "windows", pruning.SortedRows.windows_at_once))
        dense, pruned = engines(K, e, score, residuals)
        phi = torch.empty(9, 1, 3)
        expected = dense.intervals(phi, levels)
        assert torch.equal(pruned.intervals(phi, levels), expected)
        assert pruned.sets(phi, levels[0]) == dense.sets(phi, levels[0])
        stack.enter_context(patch.object(grouping, "_LIKE_LABELS", {"cpu": group}))
        stack.enter_context(patch.object(grouping, "_OVERHEAD", {"cpu": overhead}))
        f = torch.from_numpy(np.random.default_rng(seed).normal(size=(9, 1)))
        ends = expected[:, :, 0, 0]
        for r in (f.flip(0), e[torch.arange(9) % N, None], torch.where(ends.isfinite(), ends, 0.3)[:, 1:]):
            assert torch.equal(pruned.p_values(phi, f, f + r), dense.p_values(phi, f, f + r))


def test_rows_are_left_out():
    """The same with many rows, few of which matter: otherwise the test above compares the dense way with itself."""
    rng = np.random.default_rng(0)
    N, D = 3000, 5
    phi = rng.normal(size=(N + 300, D))
    K = torch.from_numpy(phi @ np.linalg.solve(phi[:N].T @ phi[:N] + np.eye(D), phi.T))
    e = torch.from_numpy(rng.standard_t(3, size=N))
    for residuals in RESIDUALS:
        dense, pruned = engines(K, e, "studentized", residuals)
        phi = torch.empty(300, 1, 3)
        found = pruned.intervals(phi, LEVELS)
        assert 0 < pruned.curvature.asked < 3 * 0.1 * N  # by three groups
        assert torch.equal(found, dense.intervals(phi, LEVELS))
        assert dense.curvature.asked >= N
        pruned.curvature.asked = 0
        f, y = torch.zeros(300, 1).double(), torch.from_numpy(rng.standard_t(3, size=(300, 1)))
        found = pruned.p_values(phi, f, y)
        assert 0 < pruned.curvature.asked < 10 * 0.3 * N  # by ten groups
        assert torch.equal(found, dense.p_values(phi, f, y))


@settings(max_examples=100)
@given(st.integers(0, 10**6), st.integers(1, 300), st.integers(1, 5), st.integers(1, 8), st.sampled_from(SCORES))
def test_rows_around_labels(seed, N, g, G, score):
    """Rows left out are on the side of each label that their own bounds say, and none that may lie on one is."""
    rng = np.random.default_rng(seed)
    e, s = rng.normal(size=N).round(1), 1 - rng.uniform(0, 1, size=N) ** rng.integers(1, 8)
    e, s = torch.from_numpy(e), torch.from_numpy(s)
    h = torch.from_numpy(10.0 ** rng.uniform(-4, 1, size=(g, 1)) * [1, rng.choice([1, 1.5])])
    least = torch.from_numpy(np.sort(rng.normal(size=(g, G)).round(1)))
    most = (least + rng.choice([0, 0.01, 2])).contiguous()
    for memory in (10**9, 1):
        with patch.object(pruning, "_BLOCK", int(rng.integers(1, 20))):
            found = pruning.SortedRows(score, e, s).around(h, least, most, memory)
        assert len(found) == g
        for i, around in enumerate(found):
            low, high = changepoint_bounds(score, (e, e), (s, s), (h[i, :1], h[i, 1:]))
            below, above = high[:, None] < least[i], low[:, None] > most[i]  # (N, G)
            out = torch.ones(N, dtype=torch.bool)
            out[around.rows] = False
            assert len(around.rows) == (~out).sum()  # none twice
            assert (below | above)[out].all()
            assert (below | above).all(1)[around.rows].sum() == 0  # no more than need be
            before, beyond = around.others(torch.arange(G), N)
            assert torch.equal(before, (below & out[:, None]).sum(0))
            assert torch.equal(beyond, (above & out[:, None]).sum(0))


@pytest.mark.parametrize("signed", [True, False])
def test_rows_around_labels_do_not_grow_with_the_rows(signed):
    """Leverages fall as 1 / N: what lies between the labels of a group grows with N, what they want does not."""
    rng = np.random.default_rng(0)
    counts = []
    for N in (80_000, 320_000):
        e = torch.from_numpy(rng.standard_t(3, size=N))
        h_i = torch.from_numpy(rng.gamma(5.0, 0.2, size=N) * 50 / N)  # D = 50
        sorted_rows = pruning.SortedRows("studentized", e if signed else e.abs(), 1 - h_i)
        h, z = h_i[:1000], torch.from_numpy(rng.standard_t(3, size=1000))
        z = z if signed else z.abs()
        groups = list(grouping.groups_by_label(sorted_rows, h, z - 1e-9, z + 1e-9, 50, 10**9))
        assert torch.equal(torch.cat([points for points, _ in groups]).sort().values, torch.arange(1000))
        counts.append(sum(len(points) * len(around.rows) for points, around in groups))
    assert counts[1] < 1.5 * counts[0]  # products with all rows between the labels would be four times as many
    assert counts[1] < 0.01 * 1000 * 320_000


@settings(max_examples=300)
@given(st.integers(0, 10**6), st.sampled_from(SCORES), st.booleans(), st.booleans())
def test_bounds_hold(seed, score, approximate, ranges):
    """Every changepoint lies between its bounds, at the extremes of the cross leverage too."""
    rng = np.random.default_rng(seed)
    n = 40
    h_i = rng.uniform(0, 1.5 if approximate else 1, size=n) ** rng.integers(1, 6)
    h = 10.0 ** rng.uniform(-4, 2)
    share = rng.choice([-1, 1, -1 + 1e-9, 0, rng.uniform(-1, 1)], size=n)
    c = torch.from_numpy(share * np.sqrt(h_i * h))[None]
    e = torch.from_numpy(rng.normal(size=n).round(1))
    s, at = torch.from_numpy(1 - h_i), torch.tensor([h], dtype=torch.float64)
    wide = 1.3 if ranges else 1.0
    spread = torch.from_numpy(rng.uniform(0, 0.2, size=n)) if ranges else torch.zeros(n)
    around = (s - spread, s + spread), (at / wide, at * wide)
    low, high = changepoint_bounds(score, (e - spread, e + spread), *around)
    lower, upper = signed_changepoints(score, e, s, c, at)
    assert (lower[0] >= low * (1 + h)).all()
    assert (upper[0] <= high * (1 + h)).all()
    low, high = changepoint_bounds(score, (e.abs() - spread, e.abs() + spread), *around)
    left, right = absolute_changepoints(score, e, s, c, at)
    one = left <= right
    assert (right[one] >= (low * (1 + h))[one[0]]).all()
    assert (right[one] <= (high * (1 + h))[one[0]]).all()
    assert (-left[one] >= (low * (1 + h))[one[0]]).all()
    assert (-left[one] <= (high * (1 + h))[one[0]]).all()
    assert (high[~one[0]] == float("inf")).all()  # where rays are possible, a row always remains
    assert (low[~one[0]] == -float("inf")).all()


def network(outputs=1):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, outputs))


def rows(N, seed, outputs=1):
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(N, 3, generator=generator)
    y = X[:, :1] + 0.3 * torch.randn(N, outputs, generator=generator) * (1 + X[:, :1].abs())
    return X, y


@pytest.mark.parametrize("residuals", RESIDUALS)
@pytest.mark.parametrize("curvature", ["full", "kfac", "diagonal", "low_rank", "last_layer"])
@pytest.mark.parametrize("memory", ["1GB", "1MB"])  # in 1 MB, gradients are computed again where they are needed
def test_networks(curvature, residuals, memory):
    X, y = rows(1500, 1)
    X_new, _ = rows(200, 2)
    cp = fullcp.FullConformalRegressor(network(), curvature, residuals=residuals, l2=1.0, memory=memory)
    cp.conformalize(X, y)
    assert cp._engine.prunes
    found = cp.predict_interval(X_new, [0.5, 0.9, 0.99]).intervals
    with patch.object(cp._engine, "prunes", False):
        expected = cp.predict_interval(X_new, [0.5, 0.9, 0.99]).intervals
    torch.testing.assert_close(found, expected, rtol=1e-6 if memory == "1MB" else 1e-9, atol=0)
    for level in (0.5, 0.99):  # between labels of the set and others, p-values of all rows tell
        lower, upper = cp.predict_interval(X_new, level).intervals[:, :, 0].unbind(1)
        assert (cp.p_value(X_new, upper) > 1 - level + 1e-9).all()
        assert (cp.p_value(X_new, upper + 1e-4) <= 1 - level + 1e-9).all()
        assert (cp.p_value(X_new, lower) > 1 - level + 1e-9).all()
        assert (cp.p_value(X_new, lower - 1e-4) <= 1 - level + 1e-9).all()


@pytest.mark.parametrize("score", SCORES)
def test_independent_outputs_are_single_cases(score):
    """Of the last layer: blocks of O x O are multiples of I, and each output is what it would be alone."""
    X, y = rows(600, 1, outputs=3)
    X_new, _ = rows(50, 2)
    model = network(3)
    cp = fullcp.FullConformalRegressor(model, "last_layer", score=score, l2=1.0).conformalize(X, y)
    found = cp.predict_interval(X_new, [0.8, 0.95]).intervals
    with patch.object(Query, "of_one", None):
        blocks = cp.predict_interval(X_new, [0.8, 0.95]).intervals
    torch.testing.assert_close(found, blocks, rtol=1e-8, atol=1e-10)


def test_threads_and_modes_do_not_mix_up_rows():
    """Gradients that are computed again are kept for the next call, whoever makes it."""
    X, y = rows(3000, 1)
    X_new, _ = rows(120, 2)
    model = nn.Sequential(nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 1))
    cp = fullcp.FullConformalRegressor(model, "full", l2=1.0, memory="1MB").conformalize(X, y)
    with torch.inference_mode():
        cp.predict_interval(X_new[:5], 0.9)
    parts = torch.split(X_new, 20)
    expected = [cp.predict_interval(part, [0.5, 0.9]).intervals for part in parts]
    with ThreadPoolExecutor(6) as pool:
        for _ in range(3):
            found = list(pool.map(lambda part: cp.predict_interval(part, [0.5, 0.9]).intervals, parts))
            for a, b in zip(found, expected):
                torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("memory", ["2GB", "1MB"])  # gradients held, and computed again
@pytest.mark.parametrize("residuals", RESIDUALS)
@pytest.mark.parametrize("curvature", ["full", "kfac", "diagonal", "last_layer", "low_rank:8"])
def test_p_values_of_labels_about_which_every_row_is_certain(curvature, residuals, memory):
    X, y = rows(2000, 1)
    X_new, y_new = rows(70, 2)
    cp = fullcp.FullConformalRegressor(network(), curvature, residuals=residuals, l2=1.0, memory=memory)
    cp.conformalize(X, y)
    outliers = y_new + torch.cat([torch.zeros(20, 1), torch.full((25, 1), 1e3), torch.full((25, 1), -1e6)])
    found = cp.p_value(X_new, outliers)
    one_by_one = torch.cat([cp.p_value(X_new[i : i + 1], outliers[i : i + 1]) for i in range(15, 50)])
    assert torch.equal(found[15:50], one_by_one)
    with patch.object(cp._engine, "prunes", False):
        assert torch.equal(found, cp.p_value(X_new, outliers))
    least = 1 / 2001 if residuals == "absolute" else 2 / 2001
    torch.testing.assert_close(found[20:], torch.full((50,), least, dtype=torch.float64))


def test_p_values_of_labels_far_from_zero():
    """Seconds since 1970, say: rounding of changepoints is relative to their own size, not to that of the labels."""
    X, y = rows(2000, 1)
    X_new, y_new = rows(500, 2)
    model = nn.Linear(3, 1).double()
    with torch.no_grad():
        model.weight.zero_()[0, 0] = 1.0
        model.bias.fill_(1e10)
    cp = fullcp.FullConformalRegressor(model, "full", l2=1e-6, refine=True)
    cp.conformalize(X.double(), y.double() + 1e10)
    lower, upper = cp.predict_interval(X_new.double(), 0.9).intervals[:, :, 0].unbind(1)
    label = y_new[:, 0].double() + 1e10
    inside = (label >= lower) & (label <= upper)
    assert 0.85 < float(inside.double().mean()) < 0.95
    assert torch.equal(cp.p_value(X_new.double(), label) > 0.1, inside)


class TestRecentRows:
    def setup_method(self):
        self.asked = []

    def compute(self, indices):
        self.asked.append(indices)
        return torch.tensor(indices, dtype=torch.float64).unsqueeze(1) * 10

    def test_rows_are_computed_once(self):
        recent = RecentRows(self.compute, 100, 3, 20)
        wanted = torch.tensor([5, 3, 90, 3, 17])
        assert torch.equal(recent(wanted)[:, 0], wanted.double() * 10)
        assert torch.equal(recent(torch.tensor([90, 4]))[:, 0], torch.tensor([900.0, 40.0]).double())
        assert sorted(i for indices in self.asked for i in indices) == [3, 4, 5, 17, 90]
        assert max(map(len, self.asked)) <= 3

    def test_no_more_are_kept_than_fit(self):
        recent = RecentRows(self.compute, 100, 50, 10)
        for start in range(0, 100, 8):
            wanted = torch.arange(start, min(100, start + 8))
            assert torch.equal(recent(wanted)[:, 0], wanted.double() * 10)
            assert recent.kept <= 10
        wanted = torch.arange(60)
        assert torch.equal(recent(wanted)[:, 0], wanted.double() * 10)
        assert recent.kept <= 10


@pytest.mark.parametrize("residuals", RESIDUALS)
@pytest.mark.parametrize("curvature", ["full", "kfac", "last_layer"])
def test_the_informed_split_prunes_too(curvature, residuals):
    """Its curvature is about calibration rows that come behind training rows, or in whitened coordinates."""
    X, y = rows(900, 1)
    X_new, y_new = rows(150, 2)
    cp = fullcp.InformedSplitConformalRegressor(network(), curvature, residuals=residuals, l2=1.0)
    cp.fit(X[:400], y[:400]).conformalize(X[400:], y[400:])
    assert cp._engine.prunes
    found, p = cp.predict_interval(X_new, [0.5, 0.9, 0.99]).intervals, cp.p_value(X_new, y_new)
    with patch.object(cp._engine, "prunes", False):
        torch.testing.assert_close(found, cp.predict_interval(X_new, [0.5, 0.9, 0.99]).intervals, rtol=1e-8, atol=0)
        assert torch.equal(p, cp.p_value(X_new, y_new))


def test_rows_that_are_not_held_are_computed_for_many_points_at_once(monkeypatch):
    """In 5 MB, changepoints come for a few points at a time, but their cross leverages for all of the group."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 60), torch.nn.Tanh(), torch.nn.Linear(60, 1))
    X, y, X_new = torch.randn(6000, 20), torch.randn(6000), torch.randn(24, 20)
    cp = fullcp.FullConformalRegressor(model, "kfac", l2=1.0, memory="5MB").conformalize(X, y)
    rows, gradients = [], Jacobian.__call__

    def counted(jacobian, x):
        rows.append(len(x))
        return gradients(jacobian, x)

    monkeypatch.setattr(Jacobian, "__call__", counted)
    small = cp.predict_interval(X_new, 0.9).intervals
    monkeypatch.undo()
    whole = fullcp.FullConformalRegressor(model, "kfac", l2=1.0).conformalize(X, y).predict_interval(X_new, 0.9)
    torch.testing.assert_close(small, whole.intervals)
    assert sum(rows) < 2000  # and twice as many where each part of the points asks for itself
    assert len(rows) < 80
