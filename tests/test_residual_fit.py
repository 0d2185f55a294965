"""CRF against its definition, and what is its own: the second network, zero residuals, files with weights."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import gelu

import fullcp
from fullcp.training import mlp, train
from predictor_cases import data, network

LEVELS = [0.5, 0.8, 0.9]


def fitted(outputs=1, **changes):
    X, y = data(outputs)
    cp = fullcp.ResidualConformalRegressor(network(outputs), **{"epochs": 10, **changes})
    return cp.fit(X[:40], y[:40]).conformalize(X[40:], y[40:]), X, y


def noisy(rows, seed):
    """Noise that grows from 0.05 to 1 with the first input."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.rand(rows, 2, generator=generator) * 2 - 1
    sigma = 0.05 + 0.95 * (X[:, 0] > 0)
    return X, X[:, 1] + sigma * torch.randn(rows, generator=generator), sigma


class Zero(nn.Module):
    """Predicts nothing, so that targets are residuals."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 1))

    def forward(self, x):
        return x @ self.weight


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("beta", [1.0, 0.01])
def test_intervals_are_those_of_the_definition(outputs, beta):
    cp, X, y = fitted(outputs, beta=beta)
    X_new = data(seed=5)[0][:12]
    first, _, last = cp.residual_model_
    y = y.reshape(len(X), outputs).double()

    def size(x):  # plain torch, no module called
        hidden = gelu(x @ first.weight.T + first.bias)
        return (hidden @ last.weight.T + last.bias).detach().double().exp() + beta

    def f(x):
        return cp.model(x).detach().double()

    scores = (y[40:] - f(X[40:])).abs() / size(X[40:])
    for level, found in zip(LEVELS, cp.predict_interval(X_new, LEVELS).intervals.unbind(2)):
        k = math.ceil(level * 31 - 1e-9)
        q = scores.sort(0).values[k - 1]
        half = (q * size(X_new)).reshape(found[:, 0].shape)
        center = f(X_new).reshape(half.shape)
        torch.testing.assert_close(found[:, 0], center - half, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found[:, 1], center + half, rtol=1e-5, atol=1e-6)


def test_the_second_network_is_trained_on_log_residuals():
    """Plain training of the same network on the same targets gives the same weights."""
    X, y = data()
    model, pattern = network(), mlp(4, (7,))
    cp = fullcp.ResidualConformalRegressor(
        model, pattern, l2=0.3, epochs=15, batch_size=16, learning_rate=(0.01, 1e-5), seed=3
    )
    cp.fit(X, y)
    expected = copy.deepcopy(pattern)
    with torch.no_grad():
        e = y.double() - model(X)[:, 0].double()
    training = train(expected, X, e.abs().log(), l2=0.3, epochs=15, batch_size=16, seed=3)
    for name, weight in expected.state_dict().items():
        assert torch.equal(weight, cp.residual_model_.state_dict()[name])
    assert cp.training_.losses == training.losses


def test_widths_follow_the_noise():
    X, y, sigma = noisy(600, 0)
    model = mlp(2)
    train(model, X[:300], y[:300], l2=3.0, epochs=150)
    cp = fullcp.ResidualConformalRegressor(model, beta=0.01, epochs=150, learning_rate=(0.01, 1e-5))
    cp.fit(X[:300], y[:300]).conformalize(X[300:], y[300:])
    X_new, y_new, sigma = noisy(2000, 1)
    result = cp.predict_interval(X_new, 0.9)
    width = (result.upper - result.lower)[:, 0]
    assert width[sigma > 0.5].mean() > 5 * width[sigma < 0.5].mean()
    inside = (result.lower[:, 0] <= y_new) & (y_new <= result.upper[:, 0])
    assert 0.85 < inside.double().mean() < 0.95
    flat = copy.deepcopy(cp).set_params(beta=1e6).conformalize(X[300:], y[300:]).predict_interval(X_new, 0.9)
    plain = fullcp.SplitConformalRegressor(model).conformalize(X[300:], y[300:]).predict_interval(X_new, 0.9)
    torch.testing.assert_close(flat.intervals, plain.intervals, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scale", [1.0, 1e6])
def test_residuals_of_zero_count_as_rounding_errors(scale):
    X, y = data(2)
    y = y * scale
    y[:5, 0] = 0.0
    y[:, 1] = 0.0
    cp = fullcp.ResidualConformalRegressor(Zero(), epochs=1)
    cp.model.weight = nn.Parameter(torch.zeros(4, 2))
    targets = cp._log_residuals(fullcp.features.Network(cp.model, X), cp._read_data(X, y))
    eps = torch.finfo(torch.float32).eps
    torch.testing.assert_close(targets[:5, 0], (eps * y[:, 0].double().abs().max()).log().expand(5))
    torch.testing.assert_close(targets[5:, 0], y[5:, 0].double().abs().log())
    assert torch.isfinite(targets).all()
    cp.fit(X, y).conformalize(X, y)
    assert torch.isfinite(cp.predict_interval(X, 0.9).intervals).all()


def test_a_normaliser_beyond_all_numbers_stays_a_number():
    pattern = nn.Linear(4, 1)
    with torch.no_grad():
        pattern.weight.fill_(1e5)
    cp, X, y = fitted(residual_model=pattern, epochs=1, learning_rate=(1e-9, 1e-9))
    X_new = torch.cat([X, X * 1e9])
    intervals = cp.predict_interval(X_new, LEVELS).intervals
    assert torch.isfinite(intervals).all()
    for level, ends in zip(LEVELS, intervals.unbind(2)):
        for end in ends.unbind(1):
            assert (cp.p_value(X_new, end) > 1 - level).all()


def test_seeds_fix_everything():
    X_new = data(seed=5)[0]
    torch.manual_seed(1)
    first = fitted(seed=7)[0].predict_interval(X_new).intervals
    torch.manual_seed(2)
    assert torch.equal(fitted(seed=7)[0].predict_interval(X_new).intervals, first)
    assert not torch.equal(fitted(seed=8)[0].predict_interval(X_new).intervals, first)
    drops = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    first = fitted(residual_model=drops)[0].predict_interval(X_new).intervals
    state = torch.get_rng_state()
    assert torch.equal(fitted(residual_model=drops)[0].predict_interval(X_new).intervals, first)
    assert torch.equal(torch.get_rng_state(), state)


def test_modules_of_the_user_are_never_changed():
    pattern = mlp(4, (5,)).train()
    pattern[0].requires_grad_(False)
    before = copy.deepcopy(pattern.state_dict())
    cp, X, y = fitted(residual_model=pattern)
    assert cp.residual_model_ is not pattern
    assert cp.get_params()["residual_model"] is pattern
    assert all(torch.equal(before[name], weight) for name, weight in pattern.state_dict().items())
    assert pattern.training
    assert all(p.grad is None for p in pattern.parameters())
    assert torch.equal(cp.residual_model_[0].weight, pattern[0].weight)  # frozen: not trained either
    assert not torch.equal(cp.residual_model_[2].weight, pattern[2].weight)
    with torch.no_grad():
        cp.residual_model_[2].weight.mul_(2)
    with pytest.raises(fullcp.NotFittedError, match="residual_model_ has changed"):
        cp.predict_interval(X)


def test_files_hold_the_second_network(tmp_path):
    pattern = mlp(4, (5,))
    cp, X, y = fitted(residual_model=pattern)
    expected = cp.predict_interval(X, LEVELS).intervals
    cp.save(tmp_path / "cp")
    load = fullcp.ResidualConformalRegressor.load
    with pytest.raises(ValueError, match="residual_model is missing: the file holds the weights for a network of you"):
        load(tmp_path / "cp", cp.model)
    with pytest.raises(ValueError, match="residual_model is not the one that was saved: it has other layers"):
        load(tmp_path / "cp", cp.model, mlp(4, (6,)))
    other = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
    with pytest.raises(ValueError, match=r"residual_model .* the same weights but other outputs"):
        load(tmp_path / "cp", cp.model, other)
    fresh = mlp(4, (5,))
    weight = fresh[0].weight.clone()
    loaded = load(tmp_path / "cp", cp.model, residual_model=fresh)
    assert torch.equal(loaded.predict_interval(X, LEVELS).intervals, expected)
    assert torch.equal(fresh[0].weight, weight)
    assert loaded.training_ is None
    assert loaded.conformalize(X[:20], y[:20]).n_rows_ == 20  # what was fitted is there, too
    own = fitted()[0]
    own.save(tmp_path / "own")
    again = load(tmp_path / "own", own.model, mlp(4))  # the library's own network needs no pattern, but may have one
    assert torch.equal(again.predict_interval(X).intervals, own.predict_interval(X).intervals)


def test_order_of_calls():
    X, y = data()
    cp = fullcp.ResidualConformalRegressor(network(), epochs=2)
    with pytest.raises(fullcp.NotFittedError, match="call fit"):
        cp.conformalize(X, y)
    cp.fit(X, y)
    with pytest.raises(fullcp.NotFittedError, match="first"):
        cp.predict(X)
    with pytest.raises(ValueError, match="rows of shape"):
        cp.conformalize(X[:, :2], y)
    cp.conformalize(X, y)
    expected = cp.predict_interval(X).intervals
    cp.set_params(beta=5.0, residuals="signed")
    with pytest.raises(ValueError, match="NaN"):
        cp.conformalize(X, y * np.nan)
    assert torch.equal(cp.predict_interval(X).intervals, expected)
    with torch.no_grad():
        cp.model[0].weight.mul_(2)
    with pytest.raises(fullcp.NotFittedError, match="the model has changed since fit"):
        cp.conformalize(X, y)
    cp.fit(X, y)
    with pytest.raises(fullcp.NotFittedError, match="first"):
        cp.predict(X)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"beta": 0.0}, ValueError, "beta must be positive and finite, got 0"),
        ({"beta": float("inf")}, ValueError, "beta must be positive"),
        ({"beta": "small"}, TypeError, "beta must be a number, got 'small'"),
        ({"residuals": "auto"}, ValueError, "residuals must be one of 'absolute', 'signed'"),
        ({"residual_model": "mlp"}, TypeError, "residual_model must be a torch.nn.Module or None, got str"),
        ({"residual_model": mlp(4, outputs=2)}, ValueError, r"residual_model has 2 output\(s\), 1 are needed"),
        ({"residual_model": mlp(3)}, ValueError, "cannot process rows"),
        ({"residual_model": nn.Linear(4, 1, device="meta")}, ValueError, "meta device"),
        ({"residual_model": mlp(4).requires_grad_(False)}, ValueError, "no parameter with requires_grad"),
        ({"l2": -1.0}, ValueError, "l2 must be"),
        ({"epochs": 0}, ValueError, "epochs must be at least 1"),
        ({"batch_size": 1.5}, TypeError, "batch_size must be a whole number"),
        ({"learning_rate": 0.1}, TypeError, "learning_rate must be two numbers"),
        ({"seed": -1}, ValueError, "seed must be at least 0"),
        ({"seed": None}, TypeError, "seed must be a whole number"),
        ({"memory": 12}, ValueError, "memory must be"),
    ],
)
def test_bad_settings(changes, error, words):
    cp = fullcp.ResidualConformalRegressor(network(), **{"epochs": 10**9, **changes})
    with pytest.raises(error, match=words):
        cp.fit(*data())
    assert not hasattr(cp, "residual_model_")


def test_rows_that_the_default_network_cannot_take():
    model = nn.Sequential(nn.Flatten(), nn.Linear(8, 1))
    X, y = torch.randn(20, 2, 4), torch.randn(20)
    with pytest.raises(ValueError, match=r"residual_model must be given for rows of shape \(2, 4\)"):
        fullcp.ResidualConformalRegressor(model, epochs=10**9).fit(X, y)
    cp = fullcp.ResidualConformalRegressor(model, copy.deepcopy(model), epochs=2).fit(X, y).conformalize(X, y)
    assert cp.predict_interval(X).intervals.shape == (20, 2, 1)
