"""joint="max": rectangles against refits and explicit joint scores, their coverage by its exact law, their volume."""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from fractions import Fraction
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom
from torch import nn

import fullcp
from fullcp import engine as engine_module
from fullcp import grouping, pruning
from fullcp.curvature import Query
from fullcp.engine import Engine
from fullcp.evaluation import joint_coverage, volume
from fullcp.influence import SCORES
from fullcp.inputs import read_levels
from fullcp.joint import PrunedScores, full_scores
from fullcp.regions import absolute_rank
from reference import dense_jacobian, ridge, ridge_gaps

LEVELS = [0.5, 0.8, 0.9]
SCALES = np.array([1.0, 3.0])


def correlated(rows, generator, outputs=2):
    """Targets whose errors share a part, of a size that differs from row to row."""
    X = torch.randn(rows, 3, generator=generator, dtype=torch.float64)
    shared = torch.randn(rows, 1, generator=generator, dtype=torch.float64)
    own = torch.randn(rows, outputs, generator=generator, dtype=torch.float64)
    sizes = torch.arange(1, outputs + 1) * (0.3 + X[:, :1].abs())
    return X, X @ torch.ones(3, outputs, dtype=torch.float64) + sizes * (shared + 0.7 * own)


def linear(X, y, l2=0.5):
    """nn.Linear at the ridge solution."""
    model = nn.Linear(X.shape[1], y.shape[1]).double()
    theta = ridge(np.hstack([X, np.ones((len(X), 1))]), y.numpy(), np.full(X.shape[1] + 1, l2))
    with torch.no_grad():
        model.weight.copy_(torch.from_numpy(theta[:-1].T))
        model.bias.copy_(torch.from_numpy(theta[-1]))
    return model


def joint_scores(X, y, x_new, labels, l2, score):
    """max_o |score| / scale of all N + 1 rows after a refit with each label vector (K, O): (N + 1, K)."""
    X1 = np.vstack([np.hstack([X, np.ones((len(X), 1))]), np.append(x_new, 1.0)])
    penalty = np.full(X1.shape[1], l2)
    gaps = ridge_gaps(X1, penalty)[:, None]
    u = {"standard": 1.0, "deleted": gaps, "studentized": np.sqrt(gaps)}[score]
    each = []
    for o, scale in enumerate(SCALES):
        Y = np.vstack([np.repeat(y[:, o, None], len(labels), 1), labels[None, :, o]])
        each.append(np.abs(Y - X1 @ ridge(X1, Y, penalty)) / u / scale)
    return np.max(each, axis=0)


@pytest.mark.parametrize("score", ["standard", "deleted", "studentized"])
@pytest.mark.parametrize("curvature", ["full", "last_layer"])
def test_rectangles_hold_the_full_conformal_set(score, curvature):
    X, y = correlated(30, torch.Generator().manual_seed(3))
    X_new = correlated(4, torch.Generator().manual_seed(4))[0] * torch.tensor([[1.0], [1.0], [2.0], [5.0]])
    model = linear(X, y)
    cp = fullcp.FullConformalRegressor(model, curvature=curvature, score=score, l2=0.5).conformalize(X, y)
    f, intervals = cp.predict_interval(X_new, LEVELS, joint="max", scales=SCALES)
    rng = np.random.default_rng(0)
    for i, x in enumerate(X_new):
        half = (intervals[i, 1, -1] - intervals[i, 0, -1]).numpy() / 2
        reach = np.where(np.isfinite(half), 1.5 * half, 50.0)
        labels = f[i].numpy() + reach * rng.uniform(-1, 1, size=(4000, 2))
        scores = joint_scores(X.numpy(), y.numpy(), x.numpy(), labels, 0.5, score)
        exact = (1 + (scores[:-1] >= scores[-1] * (1 - 1e-9)).sum(0)) / (len(X) + 1)
        p = cp.p_value(x.expand(4000, 3), labels, joint="max", scales=SCALES).numpy()
        assert (p >= exact).all()
        for j, level in enumerate(LEVELS):
            low, high = intervals[i, :, j].numpy()
            inside = ((low <= labels) & (labels <= high)).all(1)
            member = exact > 1 - level + 1e-12
            assert member.sum() > 0
            assert inside[member].all()
            assert np.array_equal(inside, p > 1 - level + 1e-12)
            if i < 2 and score != "deleted":  # within the data the rectangle is the hull of the set, but for the B's
                assert inside.sum() <= 1.7 * member.sum()


@pytest.mark.parametrize("l2", [(0.5, 0.5), (0.2, 20.0)])
@pytest.mark.parametrize("score", ["standard", "deleted", "studentized"])
def test_scores_of_the_rows_by_refits(score, l2):
    """T_i from two refits: |A_i| and |B_i| are read off the lines that scores are in the label.

    With a penalty of its own, each output has its own leverages.
    """
    X, y = correlated(25, torch.Generator().manual_seed(5))
    x = 2 * correlated(1, torch.Generator().manual_seed(6))[0]
    model = nn.Linear(3, 2).double()
    with torch.no_grad():
        for o in range(2):
            alone = linear(X, y[:, o : o + 1], l2[o])
            model.weight[o], model.bias[o] = alone.weight[0], alone.bias[0]
    each = np.concatenate([np.repeat(l2, 3), l2])  # the weight, then the bias
    cp = fullcp.FullConformalRegressor(model, curvature="full", score=score, l2=each).conformalize(X, y)
    X1 = np.hstack([np.vstack([X, x]), np.ones((26, 1))])
    T, b = [], []
    for o, scale in enumerate(SCALES):
        penalty = np.full(4, l2[o])
        gaps = ridge_gaps(X1, penalty)[:, None]
        u = {"standard": np.ones_like(gaps), "deleted": gaps, "studentized": np.sqrt(gaps)}[score]
        Y = np.repeat(np.append(y[:, o], model(x)[0, o].detach())[:, None], 2, 1)
        Y[-1, 1] += 1.0
        base, moved = ((Y - X1 @ ridge(X1, Y, penalty)) / u).T
        B = np.abs(moved - base)
        b.append(B[-1] / scale)
        with np.errstate(divide="ignore"):
            T.append(np.where(B[:-1] < B[-1], np.abs(base[:-1]) / scale / (1 - B[:-1] / B[-1]), np.inf))
    T = np.sort(np.max(T, axis=0))
    for level in read_levels(LEVELS):
        r = cp.predict_interval(x, float(level), joint="max", scales=SCALES)
        expected = T[absolute_rank(level, 25) - 1] / np.array(b)
        np.testing.assert_allclose((r.upper - r.lower)[0, 0] / 2, expected, rtol=1e-7)


class Independent:
    """A curvature of outputs that share no parameter, all of whose leverages K (N + m, N + m) are at hand."""

    independent = True
    selective = True

    def __init__(self, K, N, outputs):
        self.K, self.N, self.eye, self.asked = K, N, torch.eye(outputs).double(), 0

    def query(self, phi):
        def cross(rows, points=slice(None)):
            found = self.K[self.N :, : self.N][:, rows]
            self.asked += found.shape[1]
            return found[points][..., None, None].clone()

        V = self.K.diagonal()[self.N :].view(-1, 1, 1).clone()
        return Query(V * self.eye, lambda *which: cross(*which) * self.eye, Query(V, cross))


class Rows:
    """What the engine asks of training rows."""

    jacobian = None

    def __init__(self, N):
        self.N, self.size, self.chunk = N, 3, 7

    def slices(self):
        return [slice(i, min(i + self.chunk, self.N)) for i in range(0, self.N, self.chunk)]


@settings(max_examples=80)
@given(
    st.integers(0, 10**6),
    st.integers(1, 60),
    st.integers(1, 6),
    st.sampled_from(["plain", "ties", "zeros", "outliers", "approximate"]),
    st.lists(st.sampled_from(["1/10", "1/2", "8/10", "9/10", "99/100"]), min_size=1, max_size=4),
    st.integers(1, 9),
)
@pytest.mark.parametrize("score", SCORES)
def test_pruned_rectangles_are_the_dense_ones(score, seed, N, D, kind, levels, group):
    rng = np.random.default_rng(seed)
    phi = rng.normal(size=(N + 9, D))
    if kind == "outliers":
        phi[:: max(1, N // 3)] *= 1e4  # leverages next to 1
        phi[N] *= 1e3
    K = phi @ np.linalg.solve(phi[:N].T @ phi[:N] + 10.0 ** rng.integers(-3, 2) * np.eye(D), phi.T)
    K = torch.from_numpy(K * (1.7 if kind == "approximate" else 1.0))
    e = rng.standard_t(2, size=(N, 3))
    if kind == "ties":
        e = rng.integers(-1, 2, size=(N, 3)).astype(float)
    if kind == "zeros":
        e[rng.random(N) < 0.5] = 0.0
    e, scales = torch.from_numpy(e), torch.from_numpy(rng.choice([0.1, 1.0, 3.0], size=3))
    slack = (1 - K.diagonal()[:N]).view(-1, 1, 1) * torch.eye(3)
    levels = [Fraction(level) for level in levels]
    curvature, phi = Independent(K, N, 3), torch.empty(9, 3, 3)
    with ExitStack() as stack:
        stack.enter_context(patch.object(engine_module, "points_within", lambda *arguments: 4096))
        stack.enter_context(patch.object(engine_module, "_FEWEST_ROWS", 1))
        stack.enter_context(patch.object(pruning, "_BLOCK", group))
        stack.enter_context(patch.object(grouping, "_GROUP", {"cpu": group}))
        stack.enter_context(patch.object(grouping, "_LIKE_LABELS", {"cpu": group}))
        stack.enter_context(patch.object(grouping, "_LARGEST_SHARE", 2.0))
        engine = Engine(curvature, Rows(N), e, slack, score=score, residuals="signed", memory=10**8)
        pruned = full_scores(engine, phi, scales)
        assert isinstance(pruned, PrunedScores)
        found = pruned.half_widths(levels)
        engine.prunes = False
        dense = full_scores(engine, phi, scales)
        assert torch.equal(found, dense.half_widths(levels))
        f = torch.from_numpy(rng.normal(size=(9, 3)))
        ends = found[:, 0].where(found[:, 0].isfinite(), 0.3)
        for r in (f.flip(0), 3 * f, torch.zeros_like(f), ends, e[torch.arange(9) % N]):
            assert torch.equal(pruned.p_values(f, f + r), dense.p_values(f, f + r))


def test_rectangles_leave_rows_out():
    rng = np.random.default_rng(0)
    N, D = 3000, 5
    phi = rng.normal(size=(N + 300, D))
    K = torch.from_numpy(phi @ np.linalg.solve(phi[:N].T @ phi[:N] + np.eye(D), phi.T))
    e, curvature = torch.from_numpy(rng.standard_t(3, size=(N, 3))), Independent(K, N, 3)
    slack = (1 - K.diagonal()[:N]).view(-1, 1, 1) * torch.eye(3)
    with patch.object(engine_module, "points_within", lambda *arguments: 4096):
        engine = Engine(curvature, Rows(N), e, slack, score="studentized", residuals="signed", memory=10**8)
    pruned = full_scores(engine, torch.empty(300, 3, 3), torch.ones(3).double())
    found = pruned.half_widths([Fraction(9, 10), Fraction(99, 100)])
    assert 0 < curvature.asked < 3 * 0.1 * N  # by three groups
    curvature.asked = 0
    f, y = torch.zeros(300, 3).double(), torch.from_numpy(rng.standard_t(3, size=(300, 3)))
    p = pruned.p_values(f, y)
    assert 0 < curvature.asked < 10 * 0.3 * N  # by ten groups
    engine.prunes = False
    dense = full_scores(engine, torch.empty(300, 3, 3), torch.ones(3).double())
    assert torch.equal(found, dense.half_widths([Fraction(9, 10), Fraction(99, 100)]))
    assert torch.equal(p, dense.p_values(f, y))


@pytest.mark.parametrize("memory", ["1GB", "1MB"])
def test_pruned_rectangles_of_networks(memory):
    """The last layer, scales that change from one call to the next, levels that need infinite ends."""
    generator = torch.Generator().manual_seed(1)
    X, y = correlated(1500, generator, outputs=3)
    X_new, y_new = correlated(150, generator, outputs=3)
    cp = fullcp.FullConformalRegressor(network(X, y), "last_layer", l2=1.0, memory=memory).conformalize(X, y)
    for scales in (None, [1.0, 2.0, 0.5], 3.0):
        options = {"joint": "max", "scales": scales}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", fullcp.InfiniteIntervalWarning)
            found, p = cp.predict_interval(X_new, [0.5, 0.9, 0.9999], **options), cp.p_value(X_new, y_new, **options)
            with patch.object(cp._engine, "prunes", False):
                expected = cp.predict_interval(X_new, [0.5, 0.9, 0.9999], **options).intervals
                torch.testing.assert_close(found.intervals, expected, rtol=1e-9, atol=0)
                assert torch.equal(p, cp.p_value(X_new, y_new, **options))


def split_methods(model, X, y):
    return {
        "split": fullcp.SplitConformalRegressor(model),
        "split, signed": fullcp.SplitConformalRegressor(model, residuals="signed"),
        "normalized": fullcp.NormalizedSplitConformalRegressor(model, curvature="full", l2=0.5).fit(X, y),
        "residual fit": fullcp.ResidualConformalRegressor(model, beta=0.1, epochs=60).fit(X, y),
    }


def network(X, y, steps=60):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 12), nn.GELU(), nn.Linear(12, y.shape[1])).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(steps):
        optimizer.zero_grad()
        (model(X) - y).square().mean().backward()
        optimizer.step()
    return model


def dense_normalisers(name, cp, model, X_fit, X):
    """The normalisers of rows X (n, O) in the method's definition."""
    if name == "normalized":
        phi, at = dense_jacobian(model, X_fit)[1].flatten(0, 1), dense_jacobian(model, X)[1]
        H_inv = torch.linalg.inv(phi.T @ phi + 0.5 * torch.eye(phi.shape[1], dtype=torch.float64))
        return (1 + torch.einsum("nod,de,noe->no", at, H_inv, at)).sqrt()
    if name == "residual fit":
        with torch.no_grad():
            return cp.residual_model_(X).exp() + 0.1
    return torch.ones(len(X), 3, dtype=torch.float64)


def test_split_rectangles_by_counting():
    X, y = correlated(80, torch.Generator().manual_seed(1), outputs=3)
    model = network(X[:40], y[:40])
    scales = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)
    for name, cp in split_methods(model, X[:40], y[:40]).items():
        cp.conformalize(X[40:], y[40:])
        f, intervals = cp.predict_interval(X[:6], LEVELS, joint="max", scales=scales)
        n, n_new = (dense_normalisers(name, cp, model, X[:40], rows) for rows in (X[40:], X[:6]))
        t = ((y[40:] - cp.predict(X[40:])).abs() / n / scales).amax(1).sort().values
        for j, level in enumerate(read_levels(LEVELS)):
            expected = t[absolute_rank(level, 40) - 1] * n_new * scales
            torch.testing.assert_close(intervals[:, 1, j] - f, expected, rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(f - intervals[:, 0, j], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["split", "split, signed", "normalized", "residual fit"])
def test_coverage_of_split_rectangles_is_exactly_binomial(kind):
    """One test point a data set: covered with probability k / (N + 1), no more and no less."""
    X, y = correlated(40, torch.Generator().manual_seed(99))
    cp = split_methods(network(X, y), X, y)[kind]
    repeats, rows = 400, 39
    p = np.empty(repeats)
    generator = torch.Generator().manual_seed(7)
    for i in range(repeats):
        X, y = correlated(rows + 1, generator)
        p[i] = cp.conformalize(X[1:], y[1:]).p_value(X[:1], y[:1], joint="max", scales=SCALES)[0]
    for level in read_levels(LEVELS):
        expected = absolute_rank(level, rows) / (rows + 1)
        covered = int((p > float(1 - level) + 1e-12).sum())
        assert binom.ppf(0.0005, repeats, expected) <= covered <= binom.ppf(0.9995, repeats, expected)


@pytest.mark.parametrize("score", ["standard", "studentized"])
def test_coverage_of_refined_rectangles_is_at_least_the_level(score):
    X, y = correlated(40, torch.Generator().manual_seed(99))
    model = network(X, y)
    cp = fullcp.RefinedSplitConformalRegressor(model, curvature="last_layer", score=score, l2=0.5)
    repeats, rows = 400, 59
    p = np.empty(repeats)
    generator = torch.Generator().manual_seed(8)
    for i in range(repeats):
        X, y = correlated(rows + 1, generator)
        p[i] = cp.conformalize(X[1:], y[1:]).p_value(X[:1], y[:1], joint="max", scales=SCALES)[0]
    for level in read_levels(LEVELS):
        covered = int((p > float(1 - level) + 1e-12).sum())
        assert covered >= binom.ppf(0.0005, repeats, absolute_rank(level, rows) / (rows + 1))


@pytest.mark.parametrize("kind", ["split", "normalized", "full", "refined"])
def test_rectangles_are_smaller_than_bonferroni(kind):
    """Four outputs with errors in common, 400 rows: Bonferroni pays for four independent ones."""
    X, y = correlated(1200, torch.Generator().manual_seed(2), outputs=4)
    y = y / torch.arange(1, 5)
    model = network(X[:400], y[:400])
    cp = {
        "split": lambda: fullcp.SplitConformalRegressor(model).conformalize(X[400:800], y[400:800]),
        "normalized": lambda: (
            fullcp.NormalizedSplitConformalRegressor(model, l2=1.0)
            .fit(X[:400], y[:400])
            .conformalize(X[400:800], y[400:800])
        ),
        "full": lambda: fullcp.FullConformalRegressor(model, curvature="last_layer", l2=1.0).conformalize(
            X[:400], y[:400]
        ),
        "refined": lambda: fullcp.RefinedSplitConformalRegressor(model, curvature="last_layer", l2=1.0).conformalize(
            X[400:800], y[400:800]
        ),
    }[kind]()
    volumes, coverages = {}, {}
    for joint in ("bonferroni", "max"):
        intervals = cp.predict_interval(X[800:], 0.8, joint=joint).intervals[:, :, 0]
        volumes[joint], coverages[joint] = volume(intervals).mean(), joint_coverage(y[800:], intervals)
    assert volumes["max"] < 0.9 * volumes["bonferroni"]
    assert coverages["max"] < coverages["bonferroni"]
    assert coverages["max"] > 0.75


def test_scales_are_units():
    """Targets in other units, with scales to match, give the same rectangles in those units."""
    X, y = correlated(60, torch.Generator().manual_seed(1))
    model = linear(X[:30], y[:30])
    units = torch.tensor([10.0, 0.1], dtype=torch.float64)
    scaled = nn.Linear(3, 2).double()
    with torch.no_grad():
        scaled.weight.copy_(model.weight * units[:, None])
        scaled.bias.copy_(model.bias * units)
    for make in (
        fullcp.SplitConformalRegressor,
        lambda m: fullcp.RefinedSplitConformalRegressor(m, curvature="last_layer", l2=0.3),
    ):
        plain = make(model).conformalize(X[30:], y[30:]).predict_interval(X[:5], LEVELS, joint="max").intervals
        other = make(scaled).conformalize(X[30:], y[30:] * units)
        found = other.predict_interval(X[:5], LEVELS, joint="max", scales=units).intervals
        torch.testing.assert_close(found, plain * units, rtol=1e-9, atol=1e-9)
        three = other.predict_interval(X[:5], LEVELS, joint="max", scales=3.0).intervals
        torch.testing.assert_close(three, other.predict_interval(X[:5], LEVELS, joint="max").intervals)


@pytest.mark.parametrize("kind", ["full", "refined", "split"])
def test_intervals_sets_p_values_and_files_tell_the_same(kind, tmp_path):
    X, y = correlated(70, torch.Generator().manual_seed(1))
    model = network(X, y)
    cp = {
        "full": lambda: fullcp.FullConformalRegressor(model, curvature="last_layer"),
        "refined": lambda: fullcp.RefinedSplitConformalRegressor(model, curvature="last_layer", score="deleted"),
        "split": lambda: fullcp.SplitConformalRegressor(model),
    }[kind]().conformalize(X, y)
    X_new = 1e3 * correlated(50, torch.Generator().manual_seed(9))[0]
    f, intervals = cp.predict_interval(X_new, [0.8, 0.9], joint="max")
    assert intervals.shape == (50, 2, 2, 2)
    torch.testing.assert_close(intervals.mean(1), f[:, None].expand(50, 2, 2))
    sets = cp.predict_set(X_new, 0.9, joint="max")
    assert sets[3] == [[tuple(intervals[3, :, 1, o].tolist())] for o in range(2)]
    for corner in ([0, 0], [0, 1], [1, 0], [1, 1]):  # corners belong to their rectangles
        label = intervals[:, corner, 1, [0, 1]]
        assert (cp.p_value(X_new, label, joint="max") > 0.1 + 1e-12).all()
        assert (cp.p_value(X_new, f + 1.001 * (label - f), joint="max") <= 0.1 + 1e-12).all()
    assert cp.p_value(X_new, f, joint="max").shape == (50,)
    cp.save(tmp_path / "cp")
    loaded = type(cp).load(tmp_path / "cp", model)
    assert torch.equal(loaded.predict_interval(X_new, [0.8, 0.9], joint="max").intervals, intervals)
    small = cp.set_params(memory="1MB").predict_interval(X_new, [0.8, 0.9], joint="max").intervals
    torch.testing.assert_close(small, intervals, rtol=1e-12, atol=1e-12)


def test_one_output_is_its_own_joint():
    X, y = correlated(70, torch.Generator().manual_seed(1), outputs=1)
    model = linear(X, y)
    for cp in (fullcp.FullConformalRegressor(model), fullcp.SplitConformalRegressor(model, residuals="signed")):
        cp.conformalize(X, y[:, 0])
        plain = cp.predict_interval(X, LEVELS).intervals
        assert torch.equal(cp.predict_interval(X, LEVELS, joint="max", scales=2.0).intervals, plain)
        assert cp.predict_set(X, 0.8, joint="max") == cp.predict_set(X, 0.8)
        assert torch.equal(cp.p_value(X, y, joint="max"), cp.p_value(X, y))
    model = nn.Linear(3, 1).double()
    la = fullcp.LaplaceRegressor(model, l2=1.0).fit(X, y[:, 0])
    assert torch.equal(la.predict_interval(X, joint="max").intervals, la.predict_interval(X).intervals)


def test_too_few_rows_are_told():
    X, y = correlated(10, torch.Generator().manual_seed(1))
    cp = fullcp.SplitConformalRegressor(linear(X, y)).conformalize(X, y)
    with pytest.warns(fullcp.InfiniteIntervalWarning, match="needs at least 19 rows"):
        assert cp.predict_interval(X, 0.95, joint="max").intervals.isinf().all()
    with pytest.warns(fullcp.InfiniteIntervalWarning, match="with 2 outputs at once.* needs at least 19 rows"):
        cp.predict_interval(X, 0.9, joint="bonferroni")
    assert cp.predict_interval(X, 0.9, joint="max").intervals.isfinite().all()


def test_what_cannot_be_ranked_together_is_refused():
    X, y = correlated(40, torch.Generator().manual_seed(1))
    model = network(X, y)
    coupled = fullcp.FullConformalRegressor(model, curvature="full", l2=1.0).conformalize(X, y)
    for call in (
        lambda **k: coupled.predict_interval(X, **k),
        lambda **k: coupled.predict_set(X, **k),
        lambda **k: coupled.p_value(X, y, **k),
    ):
        with pytest.raises(ValueError, match=r"joint='max' needs curvature in which outputs share no parameter.*last"):
            call(joint="max")
    la = fullcp.LaplaceRegressor(model, l2=1.0).fit(X, y)
    with pytest.raises(ValueError, match=r"is for conformal methods.*LaplaceRegressor takes joint='bonferroni'"):
        la.predict_interval(X, joint="max")
    assert la.predict_interval(X, joint="bonferroni").intervals.isfinite().all()
    cp = fullcp.SplitConformalRegressor(model).conformalize(X, y)
    for scales, error, words in (
        ([1.0, 2.0, 3.0], ValueError, "one number or 2, one an output, got shape"),
        ([[1.0, 2.0]], ValueError, "one number or 2"),
        ([1.0, 0.0], ValueError, "scales must be positive and finite"),
        (float("nan"), ValueError, "scales must be positive and finite"),
        ("wide", TypeError, "scales must be a positive number"),
    ):
        with pytest.raises(error, match=words):
            cp.predict_interval(X, joint="max", scales=scales)
    with pytest.raises(ValueError, match="scales are for joint='max', got joint='bonferroni'"):
        cp.predict_interval(X, joint="bonferroni", scales=1.0)
    with pytest.raises(ValueError, match="joint must be one of"):
        cp.predict_interval(X, joint="both")
