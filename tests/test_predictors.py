"""The contract every predictor passes: shapes, kinds of data, nested levels, sets, p-values, save and load."""

from __future__ import annotations

import copy
import pickle
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors import safe_open
from sklearn.base import clone
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fullcp


def network(outputs=1, seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, outputs)).to(dtype)


def data(outputs=1, rows=70, seed=1, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(rows, 4, generator=generator)
    y = X[:, :1] * torch.arange(1, outputs + 1) + torch.randn(rows, outputs, generator=generator)
    return X.to(dtype), (y[:, 0] if outputs == 1 else y).to(dtype)


def fit_both(cp, X, y):
    """A method that is given training and calibration rows."""
    return cp.fit(X[:45], y[:45]).conformalize(X[45:], y[45:])


# A predictor is tested by adding a line: name -> (class, arguments, how it is given data).
PREDICTORS = {
    "full": (fullcp.FullConformalRegressor, {}, lambda cp, X, y: cp.conformalize(X, y)),
    "full, signed, deleted": (
        fullcp.FullConformalRegressor,
        {"residuals": "signed", "score": "deleted", "refine": True, "l2": [1.0, 2.0, 3.0, 4.0]},
        lambda cp, X, y: cp.conformalize(X, y),
    ),
    "full, dual": (
        fullcp.FullConformalRegressor,
        {"residuals": "signed", "score": "standard"},
        lambda cp, X, y: cp.conformalize(X[:25], y[:25]),
    ),
    "refined split": (fullcp.RefinedSplitConformalRegressor, {"l2": 0.5}, lambda cp, X, y: cp.conformalize(X, y)),
    "normalized split": (fullcp.NormalizedSplitConformalRegressor, {}, fit_both),
    "normalized split, dual, signed": (
        fullcp.NormalizedSplitConformalRegressor,
        {"residuals": "signed"},
        lambda cp, X, y: cp.fit(X[:20], y[:20]).conformalize(X[20:], y[20:]),
    ),
    "split": (fullcp.SplitConformalRegressor, {}, lambda cp, X, y: cp.conformalize(X, y)),
    "split, signed": (fullcp.SplitConformalRegressor, {"residuals": "signed"}, lambda cp, X, y: cp.conformalize(X, y)),
    "laplace": (fullcp.LaplaceRegressor, {"noise": 0.8}, lambda cp, X, y: cp.fit(X, y)),
}
LEVELS = [0.5, 0.9, 0.8]


def build(name, outputs=1, dtype=torch.float32, fit=True, **changes):
    kind, arguments, give = PREDICTORS[name]
    cp = kind(network(outputs, dtype=dtype), **{**arguments, **changes})
    return give(cp, *data(outputs, dtype=dtype)) if fit else cp


def test_every_public_predictor_is_in_the_list():
    from fullcp.predictors import base

    public = {kind for kind in vars(fullcp).values() if isinstance(kind, type) and issubclass(kind, base.Predictor)}
    assert public == {kind for kind, _, _ in PREDICTORS.values()}


@pytest.mark.parametrize("name", PREDICTORS)
class TestContract:
    @pytest.mark.parametrize("outputs", [1, 2])
    def test_shapes(self, name, outputs):
        cp, X = build(name, outputs), data()[0]
        tail = () if outputs == 1 else (outputs,)
        result = cp.predict_interval(X[:7], LEVELS)
        prediction, intervals = result
        assert prediction.shape == (7, *tail)
        assert intervals.shape == (7, 2, 3, *tail)
        assert torch.equal(result.prediction, prediction)
        assert torch.equal(result.lower, intervals[:, 0])
        assert torch.equal(result.upper, intervals[:, 1])
        assert cp.predict_interval(X[:7]).intervals.shape == (7, 2, 1, *tail)
        assert cp.predict_interval(X[:1], np.float32(0.9)).intervals.shape == (1, 2, 1, *tail)
        assert torch.equal(cp.predict(X[:7]), prediction)
        assert cp.p_value(X[:7], prediction).shape == (7, *tail)
        assert len(cp.predict_set(X[:7], 0.8)) == 7

    def test_levels_nest_and_keep_their_order(self, name):
        cp, X = build(name), data(seed=5)[0] * 2
        intervals = cp.predict_interval(X, LEVELS).intervals
        narrow, wide, middle = intervals.unbind(2)
        for inner, outer in ((narrow, middle), (middle, wide)):
            assert (outer[:, 0] <= inner[:, 0]).all()
            assert (inner[:, 1] <= outer[:, 1]).all()
        for j, level in enumerate(LEVELS):  # several levels in one call are the levels on their own
            assert torch.equal(cp.predict_interval(X, level).intervals[:, :, 0], intervals[:, :, j])

    def test_intervals_sets_and_p_values_tell_the_same(self, name):
        cp, X = build(name), data(seed=5)[0] * 2
        y = torch.randn(len(X), generator=torch.Generator().manual_seed(0)) * 3
        for level in LEVELS:
            lower, upper = cp.predict_interval(X, level).intervals[:, :, 0].unbind(1)
            sets = cp.predict_set(X, level)
            assert torch.equal(lower, torch.tensor([pieces[0][0] for pieces in sets], dtype=torch.float64))
            assert torch.equal(upper, torch.tensor([pieces[-1][1] for pieces in sets], dtype=torch.float64))
            inside = torch.tensor([any(lo <= yi <= hi for lo, hi in pieces) for yi, pieces in zip(y.tolist(), sets)])
            assert torch.equal(inside, cp.p_value(X, y) > 1 - level + 1e-12)
        assert torch.equal(cp.p_value(X, 0.25), cp.p_value(X, torch.full((len(X),), 0.25)))
        p = cp.p_value(X, y)
        assert ((p > 0) & (p <= 1)).all()

    def test_ends_of_intervals_belong_to_them(self, name):
        """Rounding of f + r must not push an end's p-value below the threshold."""
        for scale in (1.0, 1e6):
            X = scale * data(rows=200, seed=5)[0]
            cp = build(name)
            for level in LEVELS:
                intervals = cp.predict_interval(X, level).intervals[:, :, 0]
                for end in intervals.unbind(1):
                    if name == "laplace":  # a continuous p-value: on the threshold, to rounding
                        torch.testing.assert_close(cp.p_value(X, end), torch.full((200,), 1 - level).double())
                    else:
                        assert (cp.p_value(X, end) > 1 - level + 1e-12).all()

    def test_kinds_of_data_agree(self, name):
        kind, arguments, give = PREDICTORS[name]
        X, y = data()
        X_new = data(seed=7)[0][:9]
        expected = build(name).predict_interval(X_new, LEVELS)
        forms = {
            "numpy": lambda t: t.double().numpy(),
            "list": lambda t: t.tolist(),
            "pandas": lambda t: pd.DataFrame(t.numpy()) if t.ndim == 2 else pd.Series(t.numpy()),
            "read-only": lambda t: np.broadcast_to(t.numpy()[None], (1, *t.shape))[0],
            "double": lambda t: t.double(),
        }
        for form, convert in forms.items():
            cp = give(kind(network(), **arguments), convert_rows(convert, X), convert_rows(convert, y))
            result = cp.predict_interval(convert(X_new), LEVELS)
            assert isinstance(result.prediction, torch.Tensor) == (form == "double")
            np.testing.assert_allclose(result.prediction, expected.prediction, rtol=1e-6)
            np.testing.assert_allclose(result.intervals, expected.intervals, rtol=1e-6)
            assert isinstance(cp.p_value(convert(X_new), 0.0), type(result.prediction))

    def test_data_loaders(self, name):
        X, y = data()
        kind, arguments, give = PREDICTORS[name]
        cp = kind(network(), **arguments)
        if give is PREDICTORS["full"][2] or name in {"refined split", "split", "split, signed"}:
            cp.conformalize(DataLoader(TensorDataset(X, y), batch_size=16))
        elif name == "laplace":
            cp.fit(DataLoader(TensorDataset(X, y), batch_size=16))
        else:
            cp = give(cp, X, y)
        expected = build(name).predict_interval(X, 0.8).intervals
        for loader in (DataLoader(X, batch_size=16), DataLoader(TensorDataset(X, y), batch_size=16)):
            result = cp.predict_interval(loader, 0.8)
            torch.testing.assert_close(result.intervals, expected, rtol=1e-6, atol=1e-6)

    def test_rows_are_independent_of_each_other(self, name):
        cp, X = build(name, dtype=torch.float64), data(seed=5, dtype=torch.float64)[0]
        together = cp.predict_interval(X, LEVELS).intervals
        alone = torch.cat([cp.predict_interval(X[i : i + 1], LEVELS).intervals for i in range(9)])
        torch.testing.assert_close(together[:9], alone, rtol=1e-10, atol=1e-10)

    @pytest.mark.parametrize("outputs", [1, 2])
    def test_save_and_load(self, name, outputs, tmp_path):
        cp, X = build(name, outputs), data(seed=5)[0]
        cp.save(tmp_path / "cp.safetensors")
        loaded = type(cp).load(tmp_path / "cp.safetensors", copy.deepcopy(cp.model))
        assert [f.name for f in tmp_path.iterdir()] == ["cp.safetensors"]
        for level in LEVELS:
            assert torch.equal(loaded.predict_interval(X, level).intervals, cp.predict_interval(X, level).intervals)
        assert torch.equal(loaded.p_value(X, cp.predict(X) + 1), cp.p_value(X, cp.predict(X) + 1))
        assert repr(loaded).split("(")[0] == repr(cp).split("(")[0]
        loaded.save(tmp_path / "again.safetensors")
        assert (tmp_path / "again.safetensors").stat().st_size == (tmp_path / "cp.safetensors").stat().st_size

    def test_another_model_is_refused_on_load(self, name, tmp_path):
        cp = build(name)
        cp.save(tmp_path / "cp.safetensors")
        with pytest.raises(ValueError, match="model is not the one that was saved"):
            type(cp).load(tmp_path / "cp.safetensors", network(seed=3))
        other = fullcp.LaplaceRegressor if name != "laplace" else fullcp.SplitConformalRegressor
        with pytest.raises(ValueError, match=f"holds a {type(cp).__name__}, not a {other.__name__}"):
            other.load(tmp_path / "cp.safetensors", network())

    def test_a_changed_model_is_noticed(self, name):
        cp, X = build(name), data()[0]
        with torch.no_grad():
            cp.model[0].weight.mul_(1.0)  # touched, not changed
        before = cp.predict_interval(X).intervals
        with torch.no_grad():
            cp.model[0].weight.mul_(1.1)
        with pytest.raises(fullcp.NotFittedError, match="the model has changed"):
            cp.predict_interval(X)
        cp.model[0].weight.data.div_(1.1).mul_(2.0)  # past autograd's eyes
        with pytest.raises(fullcp.NotFittedError, match="the model has changed"):
            cp.predict_interval(X)
        with torch.no_grad():
            cp.model[0].weight.copy_(network()[0].weight)
        assert torch.equal(cp.predict_interval(X).intervals, before)

    def test_copies_predict_the_same(self, name, tmp_path):
        cp, X = build(name), data(seed=5)[0]
        expected = cp.predict_interval(X, LEVELS).intervals
        for copied in (copy.deepcopy(cp), pickle.loads(pickle.dumps(cp))):
            assert copied.model is not cp.model
            assert torch.equal(copied.predict_interval(X, LEVELS).intervals, expected)
        cp.model.load_state_dict(copy.deepcopy(cp.model.state_dict()), assign=True)
        assert torch.equal(cp.predict_interval(X, LEVELS).intervals, expected)

    def test_freezing_the_network_afterwards_changes_nothing(self, name, tmp_path):
        cp, X = build(name), data(seed=5)[0]
        expected = cp.predict_interval(X, LEVELS).intervals
        cp.save(tmp_path / "cp")
        for frozen in (cp.model[0], cp.model):
            frozen.requires_grad_(False)
            assert torch.equal(cp.predict_interval(X, LEVELS).intervals, expected)
            assert not any(p.requires_grad for p in frozen.parameters())
        loaded = type(cp).load(tmp_path / "cp", cp.model)
        assert torch.equal(loaded.predict_interval(X, LEVELS).intervals, expected)
        cp.save(tmp_path / "again")

    def test_what_is_saved_is_what_was_fitted(self, name, tmp_path):
        cp, X = build(name), data(seed=5)[0]
        expected = cp.predict_interval(X, LEVELS).intervals
        changes = {"score": "deleted", "residuals": "signed", "l2": 100.0, "noise": 9.0, "refine": True}
        cp.set_params(**{key: value for key, value in changes.items() if key in cp.get_params()})
        assert torch.equal(cp.predict_interval(X, LEVELS).intervals, expected)
        cp.save(tmp_path / "cp")
        loaded = type(cp).load(tmp_path / "cp", cp.model)
        assert torch.equal(loaded.predict_interval(X, LEVELS).intervals, expected)

    @pytest.mark.parametrize("memory", ["1MB", "2GB"])
    def test_callers_arrays_are_free_afterwards(self, name, memory):
        kind, arguments, give = PREDICTORS[name]
        X, y = data()
        cp = give(kind(network(), **{**arguments, "memory": memory}), X, y)
        X_new = data(seed=5)[0]
        expected = cp.predict_interval(X_new, LEVELS).intervals
        X.zero_()
        y.zero_()
        assert torch.equal(cp.predict_interval(X_new, LEVELS).intervals, expected)

    def test_threads_share_a_predictor(self, name):
        cp, X = build(name), data(rows=60, seed=5)[0]
        cp.model.train()
        rows = [1 + i % 37 for i in range(60)]
        expected = {n: cp.predict_interval(X[:n], LEVELS).intervals for n in set(rows)}
        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(lambda n: cp.predict_interval(X[:n], LEVELS).intervals, rows))
        assert all(torch.equal(expected[n], found) for n, found in zip(rows, results))
        assert all(module.training for module in cp.model.modules())

    def test_files_hold_no_rows_but_those_needed(self, name, tmp_path):
        cp = build(name)
        cp.save(tmp_path / "cp")
        with safe_open(tmp_path / "cp", "pt") as file:
            names = set(file.keys())
        assert ("x" in names) == (isinstance(cp, fullcp.FullConformalRegressor) or "dual_factor" in names)

    def test_same_weights_in_another_architecture_are_refused(self, name, tmp_path):
        cp = build(name)
        cp.save(tmp_path / "cp")
        other = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 1))
        other.load_state_dict(cp.model.state_dict())
        with pytest.raises(ValueError, match="same weights but other outputs"):
            type(cp).load(tmp_path / "cp", other)

    def test_model_is_left_alone(self, name):
        kind, arguments, give = PREDICTORS[name]
        model = network().train()
        before = copy.deepcopy(model.state_dict())
        cp = give(kind(model, **arguments), *data())
        cp.predict_interval(data()[0])
        assert model.training
        assert all(p.grad is None for p in model.parameters())
        assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())

    def test_parameters_and_clone(self, name):
        cp = build(name)
        params = cp.get_params()
        assert params["model"] is cp.model
        copied = clone(cp)
        assert type(copied) is type(cp)
        assert copied.get_params().keys() == params.keys()
        assert not hasattr(copied, "network_")
        assert copied.set_params(memory="1GB").memory == "1GB"
        with pytest.raises(ValueError, match="'colour' is no parameter"):
            cp.set_params(colour="red")
        assert repr(cp).startswith(type(cp).__name__ + "(model=Sequential, ")

    def test_predicting_too_early(self, name):
        cp, X = build(name, fit=False), data()[0]
        for call in (cp.predict, cp.predict_interval, cp.predict_set, lambda X: cp.p_value(X, 0.0)):
            with pytest.raises(fullcp.NotFittedError, match="first"):
                call(X)

    def test_failed_fit_keeps_the_old_one(self, name):
        kind, arguments, give = PREDICTORS[name]
        cp = build(name)
        X, y = data()
        expected = cp.predict_interval(X).intervals
        with pytest.raises(ValueError, match="NaN or infinite"):
            give(cp, X, y * float("nan"))
        assert torch.equal(cp.predict_interval(X).intervals, expected)

    def test_inference_mode_of_the_caller(self, name):
        kind, arguments, give = PREDICTORS[name]
        X, y = data()
        model = network()
        with torch.inference_mode():
            cp = give(kind(model, **arguments), X.clone(), y.clone())
            inside = cp.predict_interval(X.clone(), LEVELS).intervals
        torch.testing.assert_close(build(name).predict_interval(X, LEVELS).intervals, inside.clone())
        outside = cp.predict_interval(X, LEVELS).intervals
        assert torch.equal(outside, inside)


def convert_rows(convert, values):
    """Convert, keeping what slices as rows do: frames are cut by position."""
    converted = convert(values)
    return Sliceable(converted) if isinstance(converted, (pd.DataFrame, pd.Series)) else converted


class Sliceable:
    """A frame that is sliced by position, as the fixtures slice."""

    def __init__(self, frame):
        self.frame = frame

    def __len__(self):
        return len(self.frame)

    def __getitem__(self, rows):
        return self.frame.iloc[rows]

    def __getattr__(self, name):
        return getattr(self.frame, name)


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
    assert loaded.l2.tolist() == [0.1, 0.2, 0.3, 0.7]


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


@pytest.mark.parametrize("name", [name for name in PREDICTORS if "full" in name or "normalized" in name])
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


@pytest.mark.parametrize("name", [name for name in PREDICTORS if name not in {"split", "split, signed"}])
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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", PREDICTORS)
def test_cuda_tensors_stay_there_and_agree(name):
    kind, arguments, give = PREDICTORS[name]
    X, y = data(dtype=torch.float64)
    cp = give(kind(network(dtype=torch.float64).cuda(), **arguments), X.cuda(), y.cuda())
    result = cp.predict_interval(X.cuda(), LEVELS)
    assert result.intervals.is_cuda
    expected = build(name, dtype=torch.float64).predict_interval(X, LEVELS).intervals
    torch.testing.assert_close(result.intervals.cpu(), expected, rtol=1e-8, atol=1e-8)
