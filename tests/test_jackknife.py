"""Jackknife+ against explicit leave-one-out refits, and CV+ against its own networks one by one."""

from __future__ import annotations

import copy
import warnings
from fractions import Fraction
from math import ceil, floor
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from scipy.stats import binom
from torch import nn

import fullcp
from reference import dense_jacobian, ridge, ridge_gaps
from test_membership import linear_model, problems

LEVELS = [0.5, 0.8, 0.9, 0.95, 0.99]


def barber(lower, upper, level):
    """The order statistics of the paper, by sorting; lower and upper (N,)."""
    N, alpha = len(lower), 1 - Fraction(str(level))
    low, high = floor(alpha * (N + 1)), ceil((1 - alpha) * (N + 1))
    return (np.sort(lower)[low - 1] if low else -np.inf), (np.sort(upper)[high - 1] if high <= N else np.inf)


def refits(X, y, x_new, l2, normalized):
    """Lower and upper ends of all models without one row, each fitted on its own."""
    ends = []
    for i in range(len(X)):
        rest, others = np.delete(X, i, 0), np.delete(y, i, 0)
        theta = ridge(rest, others[:, None], l2)[:, 0]
        width = abs(y[i] - X[i] @ theta)
        if normalized:  # 1 + h of a point is 1 / (1 - its leverage among the rows and itself)
            gaps = [ridge_gaps(np.vstack([rest, point]), l2)[-1] for point in (x_new, X[i])]
            width *= np.sqrt(gaps[1] / gaps[0])
        ends.append((x_new @ theta - width, x_new @ theta + width))
    return np.array(ends).T


@pytest.mark.parametrize("normalized", [False, True])
@settings(max_examples=60)
@given(problem=problems())
def test_intervals_equal_leave_one_out_refits(normalized, problem):
    """Whatever the weights that the linear model comes with: refinement brings them to the ridge solution."""
    X, y, x_new, l2, rng = problem
    model = linear_model(rng.normal(size=X.shape[1]))
    cp = fullcp.JackknifePlusRegressor(model, "full", normalized, l2=l2, refine=True).conformalize(X, y)
    lower, upper = refits(X, y, x_new, l2, normalized)
    scale = 1e-7 * (1 + np.abs(lower).max() + np.abs(upper).max())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fullcp.InfiniteIntervalWarning)
        found = cp.predict_interval(x_new[None], LEVELS).intervals[0]
    expected = np.array([barber(lower, upper, level) for level in LEVELS]).T
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=scale)
    for label in rng.normal(size=5) * (1 + np.abs(upper).max()):
        if min(np.abs(lower - label).min(), np.abs(upper - label).min()) > scale:
            fewer = min((lower <= label).sum(), (upper >= label).sum())
            assert cp.p_value(x_new[None], label)[0] == pytest.approx((1 + fewer) / (len(X) + 1))


@pytest.mark.parametrize("normalized", [False, True])
def test_several_outputs_equal_refits_one_by_one(normalized):
    """Outputs that share parameters: rows go with all their outputs, and each output is a problem of its own."""
    torch.manual_seed(0)

    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(3, dtype=torch.float64))

        def forward(self, x):
            return torch.stack([x @ self.w, x.flip(1) @ self.w], 1)

    model = Shared()
    X = torch.randn(25, 3, dtype=torch.float64)
    y = model(X).detach() + torch.randn(25, 2, dtype=torch.float64)
    cp = fullcp.JackknifePlusRegressor(model, "full", normalized, l2=0.5, refine=True).conformalize(X[:20], y[:20])
    found = cp.predict_interval(X[20:], [0.5, 0.8]).intervals.numpy()
    phi = np.stack([X.numpy(), X.flip(1).numpy()], 1)  # (n, 2, 3)
    l2 = np.full(3, 0.5)
    for t in range(20, 25):
        ends = np.empty((2, 2, 20))
        for i in range(20):
            rest = np.delete(np.arange(20), i)
            A = phi[rest].reshape(-1, 3)
            theta = ridge(A, y.numpy()[rest].reshape(-1, 1), l2)[:, 0]
            H_inv = np.linalg.inv(A.T @ A + np.diag(l2))
            for o in range(2):
                width = abs(y[i, o].item() - phi[i, o] @ theta)
                if normalized:
                    width *= np.sqrt((1 + phi[t, o] @ H_inv @ phi[t, o]) / (1 + phi[i, o] @ H_inv @ phi[i, o]))
                ends[o, :, i] = phi[t, o] @ theta - width, phi[t, o] @ theta + width
        for o in range(2):
            for j, level in enumerate([0.5, 0.8]):
                np.testing.assert_allclose(found[t - 20, :, j, o], barber(*ends[o], level), rtol=1e-7)


def test_a_network_is_its_linearisation():
    """Without refinement residuals are the network's own; leave-one-out residuals and ends by dense algebra."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    X = torch.randn(40, 2, dtype=torch.float64)
    y = X[:, 0] + torch.randn(40, dtype=torch.float64)
    cp = fullcp.JackknifePlusRegressor(model, l2=0.3).conformalize(X[:30], y[:30])
    f, phi = dense_jacobian(model, X)
    P, e = phi[:30, 0].numpy(), (y - f[:, 0])[:30].numpy()
    H = P.T @ P + 0.3 * np.eye(17)
    h = np.einsum("nd,de,ne->n", P, np.linalg.inv(H), P)
    np.testing.assert_allclose(cp.leave_one_out_residuals_, e / (1 - h), rtol=1e-8)
    new = phi[30:, 0].numpy()
    lower, upper = np.empty((2, 10, 30))
    for i in range(30):
        H_i = np.linalg.inv(H - np.outer(P[i], P[i]))
        centre = f[30:, 0].numpy() - new @ H_i @ P[i] * e[i]
        width = abs(e[i] / (1 - h[i])) * np.sqrt(
            (1 + np.einsum("nd,de,ne->n", new, H_i, new)) / (1 + P[i] @ H_i @ P[i])
        )
        lower[:, i], upper[:, i] = centre - width, centre + width
    found = cp.predict_interval(X[30:], LEVELS[:3]).intervals.numpy()
    expected = [[barber(lower[t], upper[t], level) for level in LEVELS[:3]] for t in range(10)]
    np.testing.assert_allclose(found, np.array(expected).transpose(0, 2, 1), rtol=1e-8)


def test_chunks_within_memory_change_nothing():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 20), nn.Tanh(), nn.Linear(20, 1)).double()
    X, y = torch.randn(700, 3, dtype=torch.float64), torch.randn(700, dtype=torch.float64)
    small, large = (
        fullcp.JackknifePlusRegressor(model, l2=1.0, memory=memory).conformalize(X, y) for memory in ("1MB", "2GB")
    )
    assert small._points_at_once() < 100 < large._points_at_once()
    torch.testing.assert_close(
        small.predict_interval(X, LEVELS).intervals, large.predict_interval(X, LEVELS).intervals, rtol=1e-12, atol=1e-12
    )


def test_rows_without_a_model_of_their_own_count_for_every_label():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    X, y = torch.randn(40, 3, dtype=torch.float64), torch.randn(40, dtype=torch.float64)
    X[:4] *= 30
    cp = fullcp.JackknifePlusRegressor(model, "diagonal", l2=1e-3)
    with pytest.warns(fullcp.MissingScoreWarning, match="there is no model without the row"):
        cp.conformalize(X, y)
    missing = np.isnan(cp.leave_one_out_residuals_)
    assert 0 < missing.sum() < 40
    least = (1 + missing.sum()) / 41
    assert (cp.p_value(X, 1e9) >= least - 1e-12).all()


def test_levels_below_one_half_are_refused():
    model = nn.Linear(2, 1)
    X, y = torch.randn(30, 2), torch.randn(30)
    for cp in (fullcp.JackknifePlusRegressor(model, l2=1.0), fullcp.CVPlusRegressor(model, folds=3, epochs=2)):
        cp.conformalize(X, y)
        with pytest.raises(ValueError, match=r"at least 0\.5 .*got 0\.4"):
            cp.predict_interval(X, [0.9, 0.4])
        with pytest.raises(ValueError, match=r"at least 0\.5"):
            cp.predict_set(X, 0.1)


@pytest.mark.parametrize("normalized", [False, True])
def test_coverage_of_ridge_regression_is_above_its_bound(normalized):
    """1 - 2 alpha is guaranteed for a linear model with a fixed penalty; heavy tails, changing noise, D = N / 2."""
    rng = np.random.default_rng(3)
    repeats, N, D = 500, 39, 20
    covered = np.zeros(3)
    model = linear_model(np.zeros(D))
    levels = [0.8, 0.9, 0.95]
    cp = fullcp.JackknifePlusRegressor(model, "full", normalized, l2=0.1, refine=True)
    for _ in range(repeats):
        X = rng.normal(size=(N + 1, D)) * rng.lognormal(size=(N + 1, 1))
        y = X[:, 0] + (0.2 + np.abs(X[:, 1])) * rng.standard_t(2, size=N + 1)
        low, high = cp.conformalize(X[1:], y[1:]).predict_interval(X[:1], levels).intervals[0]
        covered += (low <= y[0]) & (y[0] <= high)
    for level, count in zip(levels, covered):
        assert count >= binom.ppf(0.0005, repeats, 2 * level - 1)


# CV+


def sample(rows=60, outputs=1):
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(rows, 3, generator=generator, dtype=torch.float64)
    y = X[:, :1] * torch.arange(1, outputs + 1) + torch.randn(rows, outputs, generator=generator, dtype=torch.float64)
    return X, y


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("outputs", [1, 2])
def test_cv_plus_is_what_its_networks_say(outputs, normalized):
    X, y = sample(outputs=outputs)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, outputs)).double()
    cp = fullcp.CVPlusRegressor(model, 4, normalized, epochs=30, l2=0.4, seed=3).conformalize(X[:50], y[:50])
    assert sorted(np.bincount(cp.folds_)) == [12, 12, 13, 13]
    lower, upper = np.empty((2, outputs, 10, 50))
    for k, trained in enumerate(cp.models_):
        held = cp.folds_ == k
        f, phi = dense_jacobian(trained, X)
        spread = torch.ones_like(f)
        if normalized:
            P = phi[:50][~held].flatten(0, 1)
            H = P.T @ P + 0.4 * torch.eye(P.shape[1], dtype=torch.float64)
            spread = (1 + torch.einsum("nod,de,noe->no", phi, torch.linalg.inv(H), phi)).sqrt()
        score = ((y - f).abs() / spread)[:50][held]
        centre, width = f[50:].T[:, :, None], spread[50:].T[:, :, None] * score.T[:, None]
        lower[:, :, held], upper[:, :, held] = centre - width, centre + width
    found = cp.predict_interval(X[50:], 0.8).intervals[:, :, 0].reshape(10, 2, outputs)
    for t in range(10):
        for o in range(outputs):
            np.testing.assert_allclose(found[t, :, o], barber(lower[o, t], upper[o, t], 0.8), rtol=1e-8)
    torch.testing.assert_close(cp.predict(X), (model(X).detach() if outputs > 1 else model(X).detach()[:, 0]).double())


def test_networks_of_cv_plus_are_trained_on_the_other_folds_alone():
    """The network of fold 0 does not change with the targets of fold 0, and does with any other."""
    X, y = sample()
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()

    def weights(targets):
        cp = fullcp.CVPlusRegressor(model, 3, epochs=5).conformalize(X, targets)
        return [torch.cat([p.flatten() for p in m.parameters()]) for m in cp.models_], cp.folds_

    before, folds = weights(y)
    changed = y.clone()
    changed[torch.from_numpy(folds) == 0] += 1
    after, again = weights(changed)
    np.testing.assert_array_equal(folds, again)
    same = [torch.allclose(a, b, atol=1e-9) for a, b in zip(before, after)]
    assert same == [True, False, False]


def test_cv_plus_tunes_in_each_fold():
    X, y = sample()
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    cp = fullcp.CVPlusRegressor(model, 3, l2="marglik", epochs=150).conformalize(X.float(), y.float())
    l2 = [np.asarray(run.l2) for run in cp.trainings_]
    assert all(values.shape == (4,) for values in l2)
    assert not np.allclose(l2[0], l2[1])


def test_cv_plus_refuses_what_it_cannot_do(tmp_path):
    X, y = sample()
    model = nn.Linear(3, 1).double()
    with pytest.raises(ValueError, match="folds must be"):
        fullcp.CVPlusRegressor(model, 1).conformalize(X, y)
    with pytest.raises(ValueError, match="folds must leave two rows"):
        fullcp.CVPlusRegressor(model, 31).conformalize(X, y)
    with pytest.raises(TypeError, match="normalized must be True or False"):
        fullcp.CVPlusRegressor(model, 3, normalized="yes").conformalize(X, y)
    with pytest.raises(TypeError, match="refine must be True or False"):
        fullcp.JackknifePlusRegressor(model, refine=None).conformalize(X, y)
    cp = fullcp.CVPlusRegressor(model, 3, epochs=3).conformalize(X, y)
    cp.save(tmp_path / "cp")
    loaded = fullcp.CVPlusRegressor.load(tmp_path / "cp", copy.deepcopy(model))
    assert loaded.trainings_ is None
    assert torch.equal(loaded.predict_interval(X).intervals, cp.predict_interval(X).intervals)


def test_normalised_ends_are_those_of_full_conformal_prediction():
    """Studentized absolute residuals: the changepoints are the leave-one-out ends."""
    torch.manual_seed(0)
    X, y = torch.randn(60, 3), torch.randn(60)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    X_new, levels = 3 * torch.randn(20, 3), [0.6, 0.9]
    plus = fullcp.JackknifePlusRegressor(model, l2=0.5).conformalize(X, y).predict_interval(X_new, levels)
    full = fullcp.FullConformalRegressor(model, residuals="absolute", l2=0.5).conformalize(X, y)
    torch.testing.assert_close(plus.intervals, full.predict_interval(X_new, levels).intervals, rtol=1e-10, atol=1e-10)


def test_settings_come_back_as_they_were_given(tmp_path):
    torch.manual_seed(0)
    X, y = torch.randn(40, 2), torch.randn(40)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
    cp = fullcp.CVPlusRegressor(model, folds=2, epochs=2, learning_rate=(0.02, 0.01), l2=[0.1, 0.2, 0.3, 0.4])
    cp.conformalize(X, y).save(tmp_path / "cv")
    loaded = fullcp.CVPlusRegressor.load(tmp_path / "cv", model)
    assert list(loaded.learning_rate) == [0.02, 0.01]
    assert loaded.l2 == [0.1, 0.2, 0.3, 0.4]


@pytest.mark.parametrize("memory", ["1GB", "1MB"])  # in 1 MB, gradients are computed again where they are needed
@pytest.mark.parametrize(("curvature", "outputs"), [("full", 1), ("low_rank", 1), ("last_layer", 1), ("last_layer", 3)])
def test_the_pruned_engine_has_the_same_ends(curvature, outputs, memory):
    """Intervals and p-values from few rows are those of all models without a row, infinite ends too."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, outputs))
    X = torch.randn(900, 3)
    X[::90] *= 30  # leverages next to 1
    y = X[:, :1] + (1 + X[:, :1].abs()) * torch.randn(900, outputs)
    y[100:120] = model(X[100:120]).detach()  # residuals of 0, but for rounding
    X_new = torch.cat([torch.randn(150, 3), 20 * torch.randn(10, 3)])
    y_new = X_new[:, :1] + 2 * torch.randn(160, outputs)
    cp = fullcp.JackknifePlusRegressor(model, curvature, l2=0.1, memory=memory).conformalize(X, y)
    assert cp._engine.pruned is not None
    levels = [0.5, 0.9, 0.99, 0.9995]  # the last is infinite with 900 rows
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fullcp.InfiniteIntervalWarning)
        found, p = cp.predict_interval(X_new, levels).intervals, cp.p_value(X_new, y_new)
        whole = cp.p_value(X_new, cp.predict(X_new))
        with patch.object(cp._engine, "pruned", None):
            torch.testing.assert_close(
                found, cp.predict_interval(X_new, levels).intervals, rtol=1e-6 if memory == "1MB" else 1e-9, atol=1e-9
            )
            torch.testing.assert_close(p, cp.p_value(X_new, y_new), rtol=0, atol=1e-9 if memory == "1GB" else 2 / 901)
            assert torch.equal(whole, cp.p_value(X_new, cp.predict(X_new)))
    assert found[:, 0, -1].isneginf().all()
    assert found[:, 1, -1].isposinf().all()
    assert found[:, :, :-1].isfinite().all()


def test_rows_without_a_model_are_not_left_to_the_engine():
    """Approximate curvature with leverages of 1 and more: full conformal prediction counts such rows otherwise."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    X, y = torch.randn(600, 3), torch.randn(600)
    X[:40] *= 10
    cp = fullcp.JackknifePlusRegressor(model, "kfac", l2=1e-4)
    with pytest.warns(fullcp.MissingScoreWarning):
        cp.conformalize(X, y)
    assert cp._engine.pruned is None


def refit(X, y, l2):
    """Weights and bias of the ridge regression on rows X (n, I) with outputs y (n, O), bias penalised too."""
    Z = torch.cat([X, torch.ones(len(X), 1, dtype=X.dtype)], 1)
    H = Z.T @ Z + l2 * torch.eye(Z.shape[1], dtype=X.dtype)
    return torch.linalg.solve(H, Z.T @ y), H, Z


def leverage(H, X):
    Z = torch.cat([X, torch.ones(len(X), 1, dtype=X.dtype)], 1)
    return (Z @ torch.linalg.inv(H) * Z).sum(1)


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("scales", [None, [0.5, 2.0]])
def test_joint_rectangles_hold_what_enough_models_hold(normalized, scales):
    """Every model without a row refitted; a label counts where the largest of its scaled residuals is no larger."""
    torch.manual_seed(0)
    N, l2, level = 30, 0.7, 0.8
    X, X_new = torch.randn(N, 3, dtype=torch.float64), 2 * torch.randn(6, 3, dtype=torch.float64)
    y = X[:, :2] + torch.randn(N, 2, dtype=torch.float64) * torch.tensor([0.3, 1.5])
    model = nn.Linear(3, 2).double()
    W, _, _ = refit(X, y, l2)
    with torch.no_grad():
        model.weight.copy_(W[:3].T)
        model.bias.copy_(W[3])
    cp = fullcp.JackknifePlusRegressor(model, normalized=normalized, l2=l2).conformalize(X, y)
    found = cp.predict_interval(X_new, level, joint="max", scales=scales).intervals[:, :, 0]  # (6, 2, 2)
    unit = torch.tensor(scales or [1.0, 1.0], dtype=torch.float64)
    low, high = [], []
    for i in range(N):
        keep = torch.arange(N) != i
        W, H, _ = refit(X[keep], y[keep], l2)
        spread = (1 + leverage(H, X_new)).sqrt() if normalized else torch.ones(6, dtype=torch.float64)
        own = (1 + leverage(H, X[i : i + 1])).sqrt() if normalized else 1.0
        T = ((y[i] - X[i] @ W[:3] - W[3]).abs() / own / unit).max()
        f = X_new @ W[:3] + W[3]
        low.append(f - T * unit * spread.unsqueeze(1))
        high.append(f + T * unit * spread.unsqueeze(1))
    low, high = torch.stack(low), torch.stack(high)  # (N, 6, 2)
    few = 6  # floor(0.2 * 31)
    torch.testing.assert_close(found[:, 0], low.sort(0).values[few - 1], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found[:, 1], high.sort(0).values[N - few], rtol=1e-9, atol=1e-9)
    labels = X_new[:, :2] + 3 * torch.randn(500, 6, 2, dtype=torch.float64)
    held = ((labels.unsqueeze(1) >= low) & (labels.unsqueeze(1) <= high)).all(3).sum(1) >= few  # (500, 6)
    inside = ((labels >= found[:, 0]) & (labels <= found[:, 1])).all(2)
    assert 0.1 < held.double().mean() < 0.9
    assert not (held & ~inside).any()
    p = torch.stack([cp.p_value(X_new, label, joint="max", scales=scales) for label in labels])
    assert torch.equal(p > 1 - level, inside)


def test_joint_rectangles_of_cv_plus():
    """The order statistics of the folds' networks, and joint coverage that is about the level, unlike one by one."""
    torch.manual_seed(1)
    X, X_new = torch.randn(200, 3), torch.randn(2000, 3)
    noise = [torch.randn(n, 2) * torch.tensor([0.5, 1.0]) for n in (200, 2000)]
    y, y_new = X[:, :2] + noise[0], X_new[:, :2] + noise[1]
    cp = fullcp.CVPlusRegressor(nn.Linear(3, 2), folds=4, l2=1.0, epochs=150).conformalize(X, y)
    found = cp.predict_interval(X_new, 0.8, joint="max", scales=[0.5, 1.0])
    scores = torch.empty(200, 2, dtype=torch.float64)
    low = torch.empty(200, 2000, 2, dtype=torch.float64)
    high = torch.empty_like(low)
    unit = torch.tensor([0.5, 1.0], dtype=torch.float64)
    for k, fold in enumerate(cp._folds):
        own = torch.from_numpy(cp.folds_ == k)
        f, spread = fold.look(X[own], 10**9)
        scores[own] = (y[own] - f).abs() / spread
        T = (scores[own] / unit).amax(1)[:, None, None] * unit
        f, spread = fold.look(X_new, 10**9)
        low[own], high[own] = f - T * spread, f + T * spread
    torch.testing.assert_close(found.lower[:, 0], low.sort(0).values[39], rtol=1e-6, atol=1e-6)  # floor(0.2 * 201)
    torch.testing.assert_close(found.upper[:, 0], high.sort(0).values[160], rtol=1e-6, atol=1e-6)
    inside = ((y_new >= found.lower[:, 0]) & (y_new <= found.upper[:, 0])).all(1).double().mean()
    alone = cp.predict_interval(X_new, 0.8)
    both = ((y_new >= alone.lower[:, 0]) & (y_new <= alone.upper[:, 0])).all(1).double().mean()
    assert 0.74 < inside < 0.92
    assert both < inside - 0.05
    p = cp.p_value(X_new, y_new, joint="max", scales=[0.5, 1.0])
    assert torch.equal(p > 0.2, ((y_new >= found.lower[:, 0]) & (y_new <= found.upper[:, 0])).all(1))
