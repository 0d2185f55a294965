"""CQR against its definition, and what is its own: crossing, empty sets, nesting, p-values, files with weights."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import gelu

import fullcp
from fullcp.predictors.quantile import conformal_quantiles, in_order, nested_ends
from fullcp.training import PinballLoss, mlp, train
from predictor_cases import data

LEVELS = [0.5, 0.8, 0.9]
TAUS = [0.05, 0.1, 0.25, 0.75, 0.9, 0.95]


def fitted(**changes):
    X, y = data()
    cp = fullcp.ConformalizedQuantileRegressor(**{"confidence_level": LEVELS, "epochs": 10, **changes})
    return cp.fit(X[:40], y[:40]).conformalize(X[40:], y[40:]), X, y


def constant(*quantiles):
    """A network that says the same everywhere, and whose training changes next to nothing."""
    model = nn.Linear(4, len(quantiles)).double()
    with torch.no_grad():
        model.weight.zero_()
        model.bias.copy_(torch.tensor(quantiles))
    return model


def untrained(model, levels, X, y):
    cp = fullcp.ConformalizedQuantileRegressor(model, levels, epochs=1, learning_rate=(1e-12, 1e-12), l2=0.0)
    return cp.fit(X, y).conformalize(X, y)


@pytest.mark.parametrize("level", LEVELS)
def test_one_level_is_the_method_of_the_paper(level):
    cp, X, y = fitted(confidence_level=level, epochs=60)
    X_new = data(seed=5)[0][:12]
    first, _, last = cp.quantile_model_

    def quantiles(x):  # plain torch, no module called
        q = (gelu(x @ first.weight.T + first.bias) @ last.weight.T + last.bias).detach().double()
        return torch.minimum(q[:, 0], q[:, 1]), torch.maximum(q[:, 0], q[:, 1])

    low, high = quantiles(X[40:])
    scores = sorted(max(a - t, t - b) for a, b, t in zip(low.tolist(), high.tolist(), y[40:].tolist()))
    q = scores[math.ceil(level * 31 - 1e-9) - 1]
    low, high = quantiles(X_new)
    assert (high - low + 2 * q > 0).all()  # nothing empty here
    found = cp.predict_interval(X_new, level)
    torch.testing.assert_close(found.lower[:, 0], low - q, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.upper[:, 0], high + q, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.prediction, (low + high) / 2, rtol=1e-5, atol=1e-5)


def test_levels_together_are_unions_of_the_methods_sets():
    """A label is in the set of a level where one of the plain sets up to that level, or the point prediction, is."""
    generator = torch.Generator().manual_seed(0)
    grid = torch.linspace(-12, 12, 961, dtype=torch.float64)
    emptied = enlarged = 0
    for _ in range(200):
        output = torch.randn(1, 6, generator=generator, dtype=torch.float64) * 3
        q = torch.randn(3, generator=generator, dtype=torch.float64)
        low, high = in_order(output)
        f = (low[:, :1] + high[:, :1]) / 2
        ends = nested_ends(low, high, f, q)[0]
        ordered = sorted(output[0].tolist())
        seen = []
        for j in range(3):
            a, b = ordered[2 - j] - q[j].item(), ordered[3 + j] + q[j].item()
            emptied += a > b
            enlarged += bool(seen) and a <= b and (a > min(seen) or b < max(seen))
            seen += [f.item(), *([a, b] if a <= b else [])]
            inside = (ends[0, j] <= grid) & (grid <= ends[1, j])
            assert torch.equal(inside, (min(seen) <= grid) & (grid <= max(seen)))
    assert emptied > 20
    assert enlarged > 20


def test_the_network_is_trained_on_the_pinball_loss():
    X, y = data()
    pattern = mlp(4, (7,), outputs=6)
    recipe = {"l2": 0.1, "epochs": 15, "batch_size": 16, "learning_rate": (0.01, 0.001), "seed": 3}
    cp = fullcp.ConformalizedQuantileRegressor(pattern, [0.9, 0.5, 0.8], **recipe).fit(X, y)
    expected = copy.deepcopy(pattern)
    training = train(expected, X, y, loss=PinballLoss(TAUS), **recipe)
    for name, weight in expected.state_dict().items():
        assert torch.equal(weight, cp.quantile_model_.state_dict()[name])
    assert cp.training_.losses == training.losses


def test_conformal_quantiles_are_order_statistics():
    scores = torch.randn(19, 3, generator=torch.Generator().manual_seed(0)).double()
    levels = fullcp.inputs.read_levels([0.5, 0.9, 0.96])
    found = conformal_quantiles(scores, levels)
    assert found.tolist() == [sorted(scores[:, 0].tolist())[9], sorted(scores[:, 1].tolist())[17], float("inf")]


def test_ends_follow_the_noise_each_for_itself():
    generator = torch.Generator().manual_seed(0)

    def sample(rows):
        """Noise upwards only, and larger where the first input is positive."""
        X = torch.rand(rows, 2, generator=generator) * 2 - 1
        scale = 0.1 + 0.9 * (X[:, 0] > 0)
        return X, X[:, 1] - scale * torch.rand(rows, generator=generator).log(), scale

    X, y, _ = sample(800)
    cp = fullcp.ConformalizedQuantileRegressor(epochs=200)
    cp.fit(X[:400], y[:400]).conformalize(X[400:], y[400:])
    X_new, y_new, scale = sample(2000)
    result = cp.predict_interval(X_new, [0.9, 0.95])
    width = result.upper - result.lower
    assert (width[scale > 0.5].mean(0) > 2 * width[scale < 0.5].mean(0)).all()
    inside = (result.lower <= y_new[:, None]) & (y_new[:, None] <= result.upper)
    assert (inside.double().mean(0) - torch.tensor([0.9, 0.95])).abs().max() < 0.04
    below, above = X_new[:, 1] - result.lower[:, 0], result.upper[:, 0] - X_new[:, 1]
    assert (above[scale > 0.5].mean() / below[scale > 0.5].mean()).abs() > 5


def test_quantiles_that_cross_are_put_in_order():
    X, y = data(dtype=torch.float64)
    right = untrained(constant(-2.0, -1.0, 1.0, 2.0), [0.5, 0.9], X, y)
    crossed = untrained(constant(1.0, 2.0, -2.0, -1.0), [0.5, 0.9], X, y)
    torch.testing.assert_close(
        crossed.predict_interval(X, [0.5, 0.9]).intervals, right.predict_interval(X, [0.5, 0.9]).intervals
    )


def test_what_would_be_empty_is_the_point_prediction():
    """Wide quantiles with targets in the middle calibrate: the correction takes more than narrow ones have."""
    model = constant(-1.0, 1.0)
    with torch.no_grad():
        model.weight[:, 0] = torch.tensor([-0.9, 0.9])
    X = torch.zeros(40, 4, dtype=torch.float64)
    X[::2, 0], X[1::2, 0] = 1.0, -1.0  # (-1.9, 1.9) and (-0.1, 0.1)
    y = torch.linspace(-0.01, 0.01, 40, dtype=torch.float64)
    y[1::2] = 0.0
    X_cal, y_cal = X[::2], y[::2]  # wide rows alone: all scores are near -1.9
    cp = untrained(model, 0.8, X_cal, y_cal)
    narrow = X[1:2]
    result = cp.predict_interval(narrow, 0.8)
    assert result.lower.item() == result.upper.item() == result.prediction.item()
    assert cp.predict_set(narrow, 0.8) == [[(result.lower.item(), result.upper.item())]]
    assert cp.p_value(narrow, result.prediction).item() == 1.0
    assert cp.p_value(narrow, 1e-3).item() == pytest.approx(0.2)
    wide = cp.predict_interval(X_cal, 0.8)
    assert (wide.upper - wide.lower < 0.03).all()  # corrected, and not empty


def test_p_values_are_the_smallest_alpha_that_rejects():
    cp, X, _ = fitted(confidence_level=[0.9, 0.8, 0.5])
    y = torch.randn(len(X), generator=torch.Generator().manual_seed(0)) * 2
    expected = torch.ones(len(X)).double()
    for level in LEVELS:
        lower, upper = cp.predict_interval(X, level).intervals[:, :, 0].unbind(1)
        expected[(y < lower) | (y > upper)] = 1 - level
    torch.testing.assert_close(cp.p_value(X, y), expected)
    assert len(set(expected.tolist())) == 4
    assert torch.equal(cp.p_value(X, y, joint="bonferroni"), cp.p_value(X, y))


def test_other_levels_are_refused():
    cp, X, _ = fitted()
    message = r"confidence_level 0\.95, 0\.7 was not trained for, only 0.5, 0.8, 0.9"
    with pytest.raises(ValueError, match=message):
        cp.predict_interval(X, [0.95, 0.8, 0.7])
    with pytest.raises(ValueError, match=r"confidence_level 0\.99 was not trained for"):
        cp.predict_set(X, 0.99)
    cp.set_params(confidence_level=0.99)  # takes effect at the next fit
    assert cp.predict_interval(X, 0.8).intervals.shape == (70, 2, 1)


def test_too_few_rows_give_infinite_intervals():
    cp, X, y = fitted()
    cp.conformalize(X[:8], y[:8])
    with pytest.warns(fullcp.InfiniteIntervalWarning, match="confidence_level 0.9 needs at least 9 rows"):
        intervals = cp.predict_interval(X, LEVELS).intervals
    assert torch.isinf(intervals[:, :, 2]).all()
    assert torch.isfinite(intervals[:, :, :2]).all()
    torch.testing.assert_close(cp.p_value(X, 1e9), torch.full((70,), 0.2).double())


def test_seeds_fix_everything():
    X_new = data(seed=5)[0]
    torch.manual_seed(1)
    first = fitted(seed=7)[0].predict_interval(X_new).intervals
    state = torch.get_rng_state()
    assert torch.equal(fitted(seed=7)[0].predict_interval(X_new).intervals, first)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(fitted(seed=8)[0].predict_interval(X_new).intervals, first)


def test_the_pattern_is_never_changed():
    pattern = mlp(4, (5,), outputs=6).train()
    pattern[0].requires_grad_(False)
    before = copy.deepcopy(pattern.state_dict())
    cp, X, y = fitted(model=pattern)
    assert cp.quantile_model_ is not pattern
    assert all(torch.equal(before[name], weight) for name, weight in pattern.state_dict().items())
    assert pattern.training
    assert torch.equal(cp.quantile_model_[0].weight, pattern[0].weight)  # frozen: not trained either
    expected = cp.predict_interval(X).intervals
    with torch.no_grad():
        pattern[2].weight.zero_()  # nothing rests on it
    assert torch.equal(cp.predict_interval(X).intervals, expected)
    cp.fit(X, y)
    with torch.no_grad():
        cp.quantile_model_[2].weight.mul_(2)
    with pytest.raises(fullcp.NotFittedError, match="quantile_model_ has changed since fit"):
        cp.conformalize(X, y)


@pytest.mark.parametrize("pattern", [None, mlp(4, (5,), outputs=6)])
def test_files_hold_the_network(pattern, tmp_path):
    cp, X, y = fitted(model=pattern)
    expected = cp.predict_interval(X, LEVELS).intervals
    cp.save(tmp_path / "cp")
    load = fullcp.ConformalizedQuantileRegressor.load
    if pattern is not None:
        with pytest.raises(ValueError, match="model is missing: the file holds the weights for a network of yours"):
            load(tmp_path / "cp")
    with pytest.raises(ValueError, match="model is not the one that was saved: it has other layers"):
        load(tmp_path / "cp", mlp(4, (6,), outputs=6))
    fresh = mlp(4, (5,) if pattern is not None else (50,), outputs=6)
    for modules in [(fresh,), ()] if pattern is None else [(fresh,)]:
        loaded = load(tmp_path / "cp", *modules)
        assert torch.equal(loaded.predict_interval(X, LEVELS).intervals, expected)
        assert loaded.training_ is None
        assert loaded.conformalize(X[:20], y[:20]).n_rows_ == 20
    assert "model=" + ("None" if pattern is None else "Sequential") in repr(cp)


def test_order_of_calls():
    X, y = data()
    cp = fullcp.ConformalizedQuantileRegressor(epochs=2)
    with pytest.raises(fullcp.NotFittedError, match="call fit"):
        cp.conformalize(X, y)
    cp.fit(X, y)
    with pytest.raises(fullcp.NotFittedError, match="first"):
        cp.predict(X)
    with pytest.raises(ValueError, match="rows of shape"):
        cp.conformalize(X[:, :2], y)
    cp.conformalize(X, y)
    with pytest.raises(ValueError, match=r"X has rows of shape \(2,\)"):
        cp.predict(X[:, :2])
    cp.fit(X[:, :2], y)  # another width of rows, for the network is made anew
    with pytest.raises(fullcp.NotFittedError, match="first"):
        cp.predict(X)
    assert cp.conformalize(X[:, :2].numpy(), y.numpy()).predict(X[:, :2]).shape == (70,)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"confidence_level": []}, ValueError, "confidence_level is empty"),
        ({"confidence_level": 1.0}, ValueError, "strictly between 0 and 1"),
        ({"confidence_level": "high"}, TypeError, "confidence_level must be a number"),
        ({"model": "mlp"}, TypeError, "model must be a torch.nn.Module, got str"),
        ({"model": mlp(4)}, ValueError, r"model has 1 output\(s\), 6 are needed"),
        ({"model": mlp(3, outputs=6)}, ValueError, "cannot process rows"),
        ({"model": mlp(4, outputs=6).requires_grad_(False)}, ValueError, "no parameter with requires_grad"),
        ({"l2": "marglik"}, ValueError, "l2='marglik' needs loss='squared'"),
        ({"l2": -1.0}, ValueError, "l2 must be"),
        ({"epochs": 0}, ValueError, "epochs must be at least 1"),
        ({"learning_rate": (1.0, 2.0)}, ValueError, "learning_rate must be"),
        ({"seed": 0.5}, TypeError, "seed must be a whole number"),
        ({"memory": 12}, ValueError, "memory must be"),
    ],
)
def test_bad_settings(changes, error, words):
    cp = fullcp.ConformalizedQuantileRegressor(**{"epochs": 10**9, **changes})
    with pytest.raises(error, match=words):
        cp.fit(*data())
    assert not hasattr(cp, "quantile_model_")


def test_bad_data():
    X, y = data()
    cp = fullcp.ConformalizedQuantileRegressor(epochs=10**9)
    with pytest.raises(ValueError, match="y has 2 columns, quantiles are learned of one target"):
        cp.fit(X, torch.stack([y, y], 1))
    with pytest.raises(ValueError, match="y contains NaN"):
        cp.fit(X, y * np.nan)
    with pytest.raises(ValueError, match=r"model must be given for rows of shape \(2, 2\)"):
        cp.fit(X.view(70, 2, 2), y)
    with pytest.raises(ValueError, match="y has 2 columns"):
        fitted()[0].conformalize(X, torch.stack([y, y], 1))
