"""What is particular to one predictor, or to one kind of network."""

from __future__ import annotations

import pickle
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import fullcp
from predictor_cases import LEVELS, PREDICTORS, build, data, network


@pytest.mark.parametrize("kind", [fullcp.FullConformalRegressor, fullcp.SplitConformalRegressor])
@pytest.mark.parametrize(
    ("residuals", "level", "least"), [("absolute", 0.9, 9), ("signed", 0.9, 19), ("signed", 0.99, 199)]
)
@pytest.mark.filterwarnings("ignore::fullcp.FarFromMinimumWarning")
def test_infinite_intervals_come_with_a_warning(kind, residuals, level, least):
    X, y = data(rows=max(least, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error", fullcp.InfiniteIntervalWarning)
        enough = kind(network(), residuals=residuals).conformalize(X, y).predict_interval(X[:3], level)
    assert torch.isfinite(enough.intervals).all()
    short = kind(network(), residuals=residuals).conformalize(X[1:], y[1:])
    with pytest.warns(fullcp.InfiniteIntervalWarning, match=f"needs at least {least} rows .* there are {least - 1}"):
        intervals = short.predict_interval(X[:3], [0.5, level]).intervals
    assert (intervals[:, 0, 1] == -torch.inf).all()
    assert (intervals[:, 1, 1] == torch.inf).all()
    assert torch.isfinite(intervals[:, :, 0]).all()


@pytest.mark.parametrize("residuals", ["absolute", "signed"])
def test_normalized_split_is_split_where_leverages_are_equal(residuals):
    """With the last bias alone trainable all gradients are 1 and all leverages the same: equal to the last bit."""
    X, y = data(rows=200)
    model = network()
    for name, p in model.named_parameters():
        p.requires_grad_(name == "2.bias")
    levels = [0.5, 0.8, 0.9, 0.95, 0.99]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fullcp.InfiniteIntervalWarning)
        plain = fullcp.SplitConformalRegressor(model, residuals=residuals).conformalize(X[100:], y[100:])
        scaled = fullcp.NormalizedSplitConformalRegressor(model, residuals=residuals).fit(X[:100], y[:100])
        scaled.conformalize(X[100:], y[100:])
        assert scaled._normaliser[0] > 1
        assert torch.equal(plain.predict_interval(X, levels).intervals, scaled.predict_interval(X, levels).intervals)
        assert torch.equal(plain.p_value(X, 0.3), scaled.p_value(X, 0.3))


@pytest.mark.parametrize("rows", [8, 60])
def test_normalized_split_remembers_the_l2_of_its_fit(rows, tmp_path):
    X, y = data(rows=100)
    cp = fullcp.NormalizedSplitConformalRegressor(network(), l2=1.0).fit(X[:rows], y[:rows])
    cp.set_params(l2=100.0)
    cp.conformalize(X[rows:], y[rows:])
    cp.save(tmp_path / "cp")
    loaded = fullcp.NormalizedSplitConformalRegressor.load(tmp_path / "cp", cp.model)
    assert loaded.l2 == 1.0
    assert torch.equal(loaded.predict_interval(X).intervals, cp.predict_interval(X).intervals)


def test_a_warning_made_an_error_leaves_no_half_of_a_fit():
    X, y = data()
    cp = fullcp.FullConformalRegressor(network(), l2=1.0).conformalize(X, y)
    with warnings.catch_warnings():
        warnings.simplefilter("error", fullcp.FarFromMinimumWarning)
        with pytest.raises(fullcp.FarFromMinimumWarning):
            cp.conformalize(X[:40], 1000 * y[:40])
    assert cp.n_rows_ == len(cp.leverages_) == 40  # the new fit, whole
    whole = fullcp.FullConformalRegressor(cp.model, l2=1.0).conformalize(X[:40], 1000 * y[:40])
    assert torch.equal(whole.predict_interval(X).intervals, cp.predict_interval(X).intervals)


def test_settings_of_other_kinds_are_kept(tmp_path):
    X, y = data()
    l2 = torch.rand(4, requires_grad=True) + 1
    cp = fullcp.FullConformalRegressor(network(), l2=l2, memory=np.int64(10**8)).conformalize(X, y)
    cp.save(tmp_path / "cp")
    loaded = fullcp.FullConformalRegressor.load(tmp_path / "cp", cp.model)
    assert torch.equal(loaded.predict_interval(X).intervals, cp.predict_interval(X).intervals)
    la = fullcp.LaplaceRegressor(network(), l2=1.0, noise=np.float32(0.5)).fit(X, y)
    la.save(tmp_path / "la")
    fullcp.LaplaceRegressor.load(tmp_path / "la", la.model).fit(X, y)


def test_wrapped_networks_load_into_plain_ones(tmp_path):
    X, y = data()
    plain = network()
    for wrapped in (
        nn.DataParallel(plain),
        torch.compile(plain, backend="eager"),
        nn.Sequential(torch.compile(plain, backend="eager")),
    ):
        cp = fullcp.FullConformalRegressor(wrapped, l2=1.0).conformalize(X, y)
        cp.save(tmp_path / "cp")
        target = nn.Sequential(plain) if isinstance(wrapped, nn.Sequential) else plain
        loaded = fullcp.FullConformalRegressor.load(tmp_path / "cp", target)
        torch.testing.assert_close(loaded.predict_interval(X).intervals, cp.predict_interval(X).intervals)


@pytest.mark.parametrize("kind", [fullcp.SplitConformalRegressor, fullcp.FullConformalRegressor])
def test_networks_made_in_inference_mode_are_refused(kind):
    with torch.inference_mode():
        model = network()
    with pytest.raises(ValueError, match=r"'0.weight' was made under torch.inference_mode"):
        kind(model).conformalize(*data())


def test_normalized_split_by_hand():
    model, (X, y) = network(dtype=torch.float64), data(rows=120, dtype=torch.float64)
    cp = fullcp.NormalizedSplitConformalRegressor(model, l2=0.3).fit(X[:60], y[:60]).conformalize(X[60:], y[60:])
    from reference import dense_jacobian

    phi = dense_jacobian(model, X)[1][:, 0]
    H_inv = torch.linalg.inv(phi[:60].T @ phi[:60] + 0.3 * torch.eye(phi.shape[1], dtype=torch.float64))
    spread = (1 + ((phi @ H_inv) * phi).sum(1)).sqrt()
    e = (y - model(X)[:, 0]).detach()
    q = (e[60:].abs() / spread[60:]).sort().values[int(np.ceil(0.9 * 61)) - 1]
    result = cp.predict_interval(X, 0.9)
    torch.testing.assert_close(result.upper[:, 0], result.prediction + q * spread)
    torch.testing.assert_close(result.lower[:, 0], result.prediction - q * spread)


def test_point_predictions_need_no_gradients(monkeypatch):
    cp, X = build("full"), data()[0]
    expected = cp.predict(X)
    monkeypatch.setattr(type(cp.network_), "__call__", None)
    assert torch.equal(cp.predict(X), expected)


def test_array_penalties_are_saved_in_full(tmp_path):
    cp = build("full, dual", l2=[0.1, 0.2, 0.3, 0.7])
    cp.save(tmp_path / "cp")
    loaded = fullcp.FullConformalRegressor.load(tmp_path / "cp", cp.model)
    assert loaded.l2 == [0.1, 0.2, 0.3, 0.7]


class Checks(nn.Module):
    """Takes counts only, and scales by a buffer that no state_dict holds."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.register_buffer("unit", torch.ones(()), persistent=False)

    def forward(self, x):
        assert (x >= 0).all(), "inputs are counts"
        return self.layer(x) * self.unit


def test_networks_that_refuse_made_up_rows_can_be_saved(tmp_path):
    X, y = data()
    cp = fullcp.FullConformalRegressor(Checks()).conformalize(X.abs(), y)
    cp.save(tmp_path / "cp")
    loaded = fullcp.FullConformalRegressor.load(tmp_path / "cp", cp.model)
    assert torch.equal(loaded.predict_interval(X.abs()).intervals, cp.predict_interval(X.abs()).intervals)
    cp.model.unit.mul_(3.0)
    with pytest.raises(fullcp.NotFittedError, match="the model has changed"):
        cp.predict_interval(X.abs())


class Root(nn.Module):
    """A square root: finite at zero, with an infinite slope."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)
        nn.init.constant_(self.layer.bias, 0.0)

    def forward(self, x):
        return self.layer(x).abs().sqrt()


LINEARISED = [
    name
    for name in PREDICTORS
    if ("full" in name or "normalized" in name) and "last layer" not in name and "retrained" not in name
]


@pytest.mark.parametrize("name", LINEARISED)
def test_gradients_that_are_no_numbers_are_refused(name):
    kind, arguments, give = PREDICTORS[name]
    X, y = data()
    arguments = {key: value for key, value in arguments.items() if key != "l2"}
    cp = give(kind(Root(), **arguments), X, y)
    X_new = X[:9].clone()
    X_new[4] = 0.0
    for call in (cp.predict_interval, cp.predict_set, lambda x: cp.p_value(x, 0.0)):
        with pytest.raises(ValueError, match="NaN or infinite gradients at row 4 of X"):
            call(X_new)
    if not arguments.get("refine"):
        assert cp.predict(X_new)[4] == 0
    X[60] = 0.0
    X[10] = 0.0
    with pytest.raises(ValueError, match="NaN or infinite gradients at row"):
        give(kind(Root(), **arguments), X, y)


WITHOUT_LEVERAGES = ("split", "residual fit", "quantile", "retrained", "cv+, plain")


@pytest.mark.parametrize("name", [name for name in PREDICTORS if not name.startswith(WITHOUT_LEVERAGES)])
def test_leverages_that_overflow_are_refused(name):
    kind, arguments, give = PREDICTORS[name]
    X, y = data(dtype=torch.float64)
    arguments = {key: value for key, value in arguments.items() if key != "l2"}
    cp = give(kind(nn.Linear(4, 1).double(), **arguments), X, y)
    X_new = X[:3].clone()
    X_new[1] = 1e160
    with pytest.raises(ValueError, match="NaN or infinite leverages at a row of X"):
        cp.predict_interval(X_new)


def test_laplace_needs_noise():
    model, (X, _) = network(), data()
    with pytest.raises(ValueError, match="noise cannot be taken from training residuals that are all zero"):
        fullcp.LaplaceRegressor(model, l2=1.0).fit(X, model(X).detach())


def test_split_works_on_frozen_networks():
    X, y = data()
    model = network().requires_grad_(False)
    assert fullcp.SplitConformalRegressor(model).conformalize(X, y).predict_interval(X).intervals.shape == (70, 2, 1)


def test_auto_residuals_by_the_number_of_rows():
    X, y = data(rows=5001)
    small = fullcp.FullConformalRegressor(network()).conformalize(X[:5000], y[:5000])
    large = fullcp.FullConformalRegressor(network()).conformalize(X, y)
    assert small.residuals_ == "absolute"
    assert large.residuals_ == "signed"


def test_a_network_far_from_its_minimum_is_told():
    X, y = data(rows=200)
    model = network()
    with pytest.warns(fullcp.FarFromMinimumWarning, match="refine=True"):
        raw = fullcp.FullConformalRegressor(model, l2=1.0).conformalize(X, 100 * y)
    assert raw.shift_ > 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", fullcp.FarFromMinimumWarning)
        refined = fullcp.FullConformalRegressor(model, l2=1.0, refine=True).conformalize(X, 100 * y)
        fullcp.RefinedSplitConformalRegressor(model).conformalize(X, 100 * y)
        fullcp.training.train(model, X, y, epochs=400)
        trained = fullcp.FullConformalRegressor(model, l2=1.0).conformalize(X, y)
    assert refined.shift_ == pytest.approx(raw.shift_)
    assert trained.shift_ < 0.2


def test_results_know_their_levels():
    result = build("full").predict_interval(data()[0], LEVELS)
    assert result.levels == tuple(LEVELS)
    again = pickle.loads(pickle.dumps(result))
    assert again.levels == result.levels
    assert torch.equal(again.lower, result.lower)
    rows = fullcp.evaluation.evaluate(data()[1], result)
    assert [row.level for row in rows] == LEVELS


def test_leverages():
    X, y = data()
    h = fullcp.FullConformalRegressor(network()).conformalize(X, y).leverages_
    assert h.shape == (70,)
    assert ((h > 0) & (h < 1)).all()
    X, y = data(outputs=2)
    assert fullcp.FullConformalRegressor(network(2)).conformalize(X, y).leverages_.shape == (70, 2, 2)


def test_integer_tokens_reach_an_embedding(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 3), nn.Flatten(), nn.Linear(12, 1))
    X = torch.randint(0, 10, (60, 4))
    cp = fullcp.FullConformalRegressor(model).conformalize(X, torch.randn(60))
    cp.save(tmp_path / "cp")
    fullcp.FullConformalRegressor.load(tmp_path / "cp", model)
    assert torch.isfinite(cp.predict_interval(X, 0.9).intervals).all()

    as_numpy = fullcp.FullConformalRegressor(model).conformalize(X.numpy(), torch.randn(60))
    assert np.array_equal(as_numpy.predict(X.numpy()), cp.predict(X).numpy())


def test_compiled_modules_are_unwrapped():
    X, y = data()
    compiled = torch.compile(network(), backend="eager")
    expected = build("full").predict_interval(X).intervals
    assert torch.equal(
        fullcp.FullConformalRegressor(compiled).conformalize(X, y).predict_interval(X).intervals, expected
    )
