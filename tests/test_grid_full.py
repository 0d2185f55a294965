"""ACP against plain loops over points and labels: residuals to first order, copies of the network at moved weights."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import fullcp
from cases import Recurrent
from fullcp.candidates import count_tails, p_values
from predictor_cases import data, network
from reference import dense_jacobian

LEVELS = [0.5, 0.8, 0.9]


def moved(model, step):
    """A copy of the model whose trainable weights are moved by the step (D,)."""
    copied, start = copy.deepcopy(model), 0
    with torch.no_grad():
        for p in copied.parameters():
            if p.requires_grad:
                p += step[start : start + p.numel()].view_as(p)
                start += p.numel()
    return copied


def direct_residuals(residual, slope, step):
    """Each residual to first order, one after the other; `slope` are their gradients."""
    return torch.stack([e + g @ step for e, g in zip(residual, slope)])


def brute_force_p(model, X, y, x_new, labels, l2, residuals, approach):
    """p-values of candidate labels by the definition."""
    points = torch.cat([X, x_new[None]])
    f, phi = (t[:, 0] for t in dense_jacobian(model, points))
    H = phi[:-1].T @ phi[:-1] + l2 * torch.eye(phi.shape[1], dtype=torch.float64)
    direction = torch.linalg.inv(H) @ phi[-1]
    p = []
    for label in labels:
        targets, step = torch.cat([y, torch.tensor([label], dtype=y.dtype)]), (label - f[-1]) * direction
        if approach == "direct":
            scores = direct_residuals(targets - f, -phi, step)
        else:
            with torch.no_grad():
                scores = targets - moved(model, step)(points).reshape(-1)
        scores = scores.abs() if residuals == "absolute" else scores
        train, new = scores[:-1], scores[-1]
        if residuals == "absolute":
            p.append((1 + (train >= new).sum().item()) / (len(X) + 1))
        else:
            fewer = min((train >= new).sum().item(), (train <= new).sum().item())
            p.append(min(1.0, 2 * (1 + fewer) / (len(X) + 1)))
    return np.array(p)


def trained(model, X, y, steps=300):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(steps):
        optimizer.zero_grad()
        (y - model(X).reshape(-1)).square().mean().backward()
        optimizer.step()
    return model


@pytest.fixture(scope="module")
def fitted():
    X, y = data(dtype=torch.float64)
    return trained(network(dtype=torch.float64), X, y), X, y


@pytest.mark.parametrize("approach", ["direct", "indirect"])
@pytest.mark.parametrize("residuals", ["absolute", "signed"])
@pytest.mark.parametrize(("rows", "l2"), [(70, 0.7), (25, 0.7), (25, 0.02)])  # primal, dual, leverages above 1
def test_p_values_and_sets_are_those_of_a_plain_loop(fitted, approach, residuals, rows, l2):
    model, X, y = fitted
    X, y = X[:rows], y[:rows]
    cp = fullcp.GridFullConformalRegressor(model, residuals=residuals, l2=l2, approach=approach, candidates=31)
    cp.conformalize(X, y)
    assert ("dual" in cp.curvature_.name) == (rows == 25)
    grid = np.linspace(y.min().item(), y.max().item(), 31)
    np.testing.assert_allclose(cp.grid_, grid)
    X_new = data(rows=5, seed=9, dtype=torch.float64)[0]
    assert l2 > 0.1 or (cp.curvature_.leverage(cp.network_(X_new)[1]) > 1).any()
    far = np.array([-50.0, grid[0] - 1, 0.123, grid[-1] + 2, 40.0])
    for x in X_new:
        p = brute_force_p(model, X, y, x, grid, l2, residuals, approach)
        np.testing.assert_allclose(cp.p_value(x.expand(31, -1), cp.grid_), p)
        np.testing.assert_allclose(
            cp.p_value(x.expand(5, -1), torch.from_numpy(far)),
            brute_force_p(model, X, y, x, far, l2, residuals, approach),
        )
        for level in LEVELS:
            inside = p > 1 - level + 1e-12
            if not inside.any():  # the nearest candidate with the largest p-value stands in
                best = np.where(p > p.max() - 1e-12, np.abs(grid - cp.predict(x[None]).item()), np.inf)
                inside = best == best.min()
            (pieces,) = cp.predict_set(x[None], level)
            assert [any(low <= g <= high for low, high in pieces) for g in cp.grid_.tolist()] == inside.tolist()
            low, high = cp.predict_interval(x[None], level).intervals[0, :, 0].tolist()
            assert (low, high) == (cp.grid_[inside].min().item(), cp.grid_[inside].max().item())


@pytest.mark.parametrize("residuals", ["absolute", "signed"])
def test_a_linear_network_takes_the_classical_influence_step(residuals):
    """Residuals e_i - c_i r and (1 - h) r, where the refit of FullConformalRegressor has r / (1 + h) for r."""
    X, y = data(rows=60, dtype=torch.float64)
    model = trained(nn.Linear(4, 1).double(), X, y)
    cp = fullcp.GridFullConformalRegressor(model, residuals=residuals, l2=0.5, approach="indirect").conformalize(X, y)
    full = fullcp.FullConformalRegressor(model, score="standard", residuals=residuals, l2=0.5).conformalize(X, y)
    phi = dense_jacobian(model, X)[1][:, 0]
    H_inv = torch.linalg.inv(phi.T @ phi + 0.5 * torch.eye(5, dtype=torch.float64))
    e = y - model(X)[:, 0].detach()
    X_new = data(rows=6, seed=9, dtype=torch.float64)[0]
    f_new, phi_new = (t[:, 0] for t in dense_jacobian(model, X_new))
    for x, f, phi_x in zip(X_new, f_new, phi_new):
        c, h = phi @ H_inv @ phi_x, phi_x @ H_inv @ phi_x
        r = cp.grid_ - f
        expected = p_values(count_tails(e - r[:, None] * c, (1 - h) * r, residuals), 60)
        torch.testing.assert_close(cp.p_value(x.expand(200, -1), cp.grid_), expected)
        # The refit on f + (1 + h) r leaves the training rows with the same residuals, but the new one with r.
        refitted = full.p_value(x.expand(200, -1), f + (1 + h) * r)
        torch.testing.assert_close(refitted, p_values(count_tails(e - r[:, None] * c, r, residuals), 60))


@pytest.mark.parametrize("residuals", ["absolute", "signed"])
def test_the_two_ways_agree_on_a_linear_network(residuals):
    X, y = data(rows=60, dtype=torch.float64)
    model = trained(nn.Linear(4, 1).double(), X, y)
    X_new = data(rows=20, seed=9, dtype=torch.float64)[0]
    direct, indirect = (
        fullcp.GridFullConformalRegressor(model, residuals=residuals, l2=0.5, approach=approach).conformalize(X, y)
        for approach in ("direct", "indirect")
    )
    for scale in (1, 10):  # far out leverages exceed 1
        assert (direct.curvature_.leverage(direct.network_(scale * X_new)[1]) > 1).any() == (scale == 10)
        for reach in (-30.0, -1.0, 0.1, 0.7, 5.0):
            labels = direct.predict(scale * X_new) + reach
            assert torch.equal(direct.p_value(scale * X_new, labels), indirect.p_value(scale * X_new, labels))
        a, b = (cp.predict_interval(scale * X_new, LEVELS).intervals for cp in (direct, indirect))
        assert torch.equal(a, b)


def test_float32_networks_run_in_their_own_dtype(fitted):
    X, y = data()
    model = trained(network(), X, y)
    X_new = data(rows=8, seed=9)[0]
    for approach in ("direct", "indirect"):
        cp, double = (
            fullcp.GridFullConformalRegressor(network, l2=0.7, approach=approach).conformalize(X, y)
            for network in (model, copy.deepcopy(model).double())
        )
        a, b = cp.predict_interval(X_new, LEVELS).intervals, double.predict_interval(X_new, LEVELS).intervals
        assert ((a - b).abs() < 1e-5).double().mean() > 0.95  # an end may flip by a step at a near tie


@pytest.mark.parametrize("rows", [70, 25])  # primal and dual
@pytest.mark.parametrize("residuals", ["absolute", "signed"])
@pytest.mark.parametrize("approach", ["direct", "indirect"])
def test_chunks_do_not_matter(fitted, approach, residuals, rows, monkeypatch):
    model, X, y = fitted
    X, y = X[:rows], y[:rows]
    X_new = data(rows=40, seed=9, dtype=torch.float64)[0]
    settings = {"residuals": residuals, "l2": 0.7, "approach": approach}
    cp = fullcp.GridFullConformalRegressor(model, **settings).conformalize(X, y)
    expected, p = cp.predict_interval(X_new, LEVELS).intervals, cp.p_value(X_new, 0.3)
    small = fullcp.GridFullConformalRegressor(model, memory="1MB", **settings).conformalize(X, y)
    way = small._way
    monkeypatch.setattr(type(small), "_points_at_once", lambda _: 3)
    if approach == "direct":
        monkeypatch.setattr(way.features, "chunk", 9)
        assert len(way.features.slices()) == -(-rows // 9)
    else:
        monkeypatch.setattr(type(way.perturbed), "rows_at_once", lambda *_: 9)
        assert way.perturbed.sets_at_once(small._budget(), 9) < 400
    assert torch.equal(small.predict_interval(X_new, LEVELS).intervals, expected)
    assert torch.equal(small.p_value(X_new, 0.3), p)


def test_modules_that_vmap_cannot_run_are_looped_over():
    torch.manual_seed(0)
    model = Recurrent().double()
    X, X_new = torch.randn(30, 5, 4).double(), torch.randn(2, 5, 4).double()
    y = X[:, :, 0].mean(1)
    weights = copy.deepcopy(model.state_dict())
    cp = fullcp.GridFullConformalRegressor(model, l2=1.0, approach="indirect", candidates=9).conformalize(X, y)
    assert not cp._way.perturbed.vectorised
    found = torch.stack([cp.p_value(X_new, label) for label in cp.grid_.tolist()], 1)
    for x, p in zip(X_new, found):
        np.testing.assert_allclose(p, brute_force_p(model, X, y, x, cp.grid_, 1.0, "absolute", "indirect"))
    assert all(torch.equal(weights[k], v) for k, v in model.state_dict().items())


@pytest.mark.parametrize("approach", ["direct", "indirect"])
def test_frozen_and_scripted_parts(approach):
    X, y = data(dtype=torch.float64)
    model = trained(network(dtype=torch.float64), X, y)
    model[0].requires_grad_(False)
    X_new = data(rows=2, seed=9, dtype=torch.float64)[0]
    expected = np.stack([brute_force_p(model, X, y, x, [0.4], 0.7, "signed", approach) for x in X_new])[:, 0]
    for kind in (model, torch.jit.script(model)):
        cp = fullcp.GridFullConformalRegressor(kind, residuals="signed", l2=0.7, approach=approach).conformalize(X, y)
        np.testing.assert_allclose(cp.p_value(X_new, 0.4), expected)


def test_sets_cut_off_by_the_grid_or_missed_by_it_are_told(fitted):
    model, X, y = fitted
    f = model(X)[:, 0].detach()
    cp = fullcp.GridFullConformalRegressor(model, l2=0.7, candidates=[3.0, -0.1, 0.0, 0.1, 3.0])
    cp.conformalize(X, y)
    assert cp.grid_.tolist() == [-0.1, 0.0, 0.1, 3.0]
    at = f.abs().argmin()
    with pytest.warns(fullcp.CandidateGridWarning, match=r"1 of 1 sets reach an end .*, 4 candidates from -0.1 to 3"):
        assert cp.predict_interval(X[at : at + 1], [0.9, 0.5]).lower.tolist()[0][0] == -0.1
    cp.set_params(candidates=[-60.0, -50.0, 50.0, 70.0]).conformalize(X, y)
    with pytest.warns(fullcp.CandidateGridWarning, match="1 of 1 sets hold a single candidate or none"):
        (pieces,) = cp.predict_set(X[at : at + 1], 0.5)
    p = [cp.p_value(X[at : at + 1], g).item() for g in cp.grid_.tolist()]
    assert max(p) <= 0.5
    assert pieces in [[(g, g)] for g, value in zip(cp.grid_.tolist(), p) if value == max(p)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cp.set_params(candidates=np.linspace(-9, 9, 300)).conformalize(X, y).predict_interval(X[:3], 0.8)


def test_settings_that_cannot_be(fitted):
    model, X, y = fitted

    def fit(X=X, y=y, model=model, **settings):
        return fullcp.GridFullConformalRegressor(model, **settings).conformalize(X, y)

    with pytest.raises(ValueError, match="model has 2 outputs: candidates form a grid over one label only"):
        fit(model=network(2, dtype=torch.float64), y=torch.stack([y, y], 1))
    with pytest.raises(ValueError, match="candidates must be at least 2, got 1"):
        fit(candidates=1)
    for bad in (True, "many", None):
        with pytest.raises(TypeError, match="candidates must be"):
            fit(candidates=bad)
    for bad in ([], [[1.0, 2.0]], 2.5):
        with pytest.raises(ValueError, match=r"candidates must be a whole number or labels \(K,\)"):
            fit(candidates=bad)
    with pytest.raises(ValueError, match="candidates contains NaN or infinite"):
        fit(candidates=[0.0, float("nan")])
    with pytest.raises(ValueError, match="y has no range for candidates to lie in, it is 2 everywhere"):
        fit(y=torch.full_like(y, 2.0))
    with pytest.raises(ValueError, match="residuals must be one of 'absolute', 'signed', got 'auto'"):
        fit(residuals="auto")
    with pytest.raises(ValueError, match="approach must be one of 'direct', 'indirect', got 'exact'"):
        fit(approach="exact")
