"""The contract every predictor passes: shapes, kinds of data, nested levels, sets, p-values, copies, save and load."""

from __future__ import annotations

import copy
import pickle
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
from predictor_cases import (
    LEVELS,
    ON_A_GRID,
    ONE_OUTPUT,
    PREDICTORS,
    QUANTILES,
    build,
    data,
    network_for,
    predicting,
)

NEED_ROWS = (
    fullcp.FullConformalRegressor,
    fullcp.GridFullConformalRegressor,
    fullcp.RetrainedFullConformalRegressor,
)
# With one output and, where the method can, with two.
WITH_OUTPUTS = [(name, outputs) for name in PREDICTORS for outputs in (1, 2) if outputs == 1 or name not in ONE_OUTPUT]


def test_every_public_predictor_is_in_the_list():
    from fullcp.predictors import base

    public = {kind for kind in vars(fullcp).values() if isinstance(kind, type) and issubclass(kind, base.Predictor)}
    assert public == {kind for kind, _, _ in PREDICTORS.values()}


@pytest.mark.parametrize(("name", "outputs"), WITH_OUTPUTS)
class TestContractForOutputs:
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


@pytest.mark.parametrize("name", PREDICTORS)
class TestContract:
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
        if name in ON_A_GRID:  # between candidates, p-values are finer than sets
            y = cp.grid_[torch.randint(len(cp.grid_), y.shape, generator=torch.Generator().manual_seed(0))]
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
                    if name.startswith("laplace"):  # a continuous p-value: on the threshold, to rounding
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
            cp = give(kind(network_for(name), **arguments), convert_rows(convert, X), convert_rows(convert, y))
            result = cp.predict_interval(convert(X_new), LEVELS)
            assert isinstance(result.prediction, torch.Tensor) == (form == "double")
            np.testing.assert_allclose(result.prediction, expected.prediction, rtol=1e-6)
            np.testing.assert_allclose(result.intervals, expected.intervals, rtol=1e-6)
            assert isinstance(cp.p_value(convert(X_new), 0.0), type(result.prediction))

    def test_data_loaders(self, name):
        X, y = data()
        kind, arguments, give = PREDICTORS[name]
        cp = kind(network_for(name), **arguments)
        if give is PREDICTORS["full"][2] or name in {"refined split", "split", "split, signed"}:
            cp.conformalize(DataLoader(TensorDataset(X, y), batch_size=16))
        elif name.startswith("laplace"):
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

    def test_another_model_is_refused_on_load(self, name, tmp_path):
        cp = build(name)
        cp.save(tmp_path / "cp.safetensors")
        other = network_for(name, seed=3)
        if name in QUANTILES:  # weights come from the file: only the layers must be those
            other = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 6))
        with pytest.raises(ValueError, match="model is not the one that was saved"):
            type(cp).load(tmp_path / "cp.safetensors", other)
        other = fullcp.LaplaceRegressor if not name.startswith("laplace") else fullcp.SplitConformalRegressor
        with pytest.raises(ValueError, match=f"holds a {type(cp).__name__}, not a {other.__name__}"):
            other.load(tmp_path / "cp.safetensors", network_for(name))

    def test_a_changed_model_is_noticed(self, name):
        cp, X = build(name), data()[0]
        model = predicting(cp)
        weight = model[0].weight.clone()
        with torch.no_grad():
            model[0].weight.mul_(1.0)  # touched, not changed
        before = cp.predict_interval(X).intervals
        with torch.no_grad():
            model[0].weight.mul_(1.1)
        with pytest.raises(fullcp.NotFittedError, match="the model has changed"):
            cp.predict_interval(X)
        model[0].weight.data.div_(1.1).mul_(2.0)  # past autograd's eyes
        with pytest.raises(fullcp.NotFittedError, match="the model has changed"):
            cp.predict_interval(X)
        with torch.no_grad():
            model[0].weight.copy_(weight)
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
        cp = give(kind(network_for(name), **{**arguments, "memory": memory}), X, y)
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
        for n, found in zip(rows, results):  # a race shows in the first digits; threads may sum in another order
            torch.testing.assert_close(found, expected[n], rtol=1e-12, atol=1e-12)
        assert all(module.training for module in cp.model.modules())

    def test_files_hold_no_rows_but_those_needed(self, name, tmp_path):
        cp = build(name)
        cp.save(tmp_path / "cp")
        with safe_open(tmp_path / "cp", "pt") as file:
            names = set(file.keys())
        assert ("x" in names) == (isinstance(cp, NEED_ROWS) or any("dual_factor" in n for n in names))

    def test_same_weights_in_another_architecture_are_refused(self, name, tmp_path):
        cp = build(name)
        cp.save(tmp_path / "cp")
        other = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, cp.model[2].out_features))
        other.load_state_dict(cp.model.state_dict())
        with pytest.raises(ValueError, match="same weights but other outputs"):
            type(cp).load(tmp_path / "cp", other)

    def test_model_is_left_alone(self, name):
        kind, arguments, give = PREDICTORS[name]
        model = network_for(name).train()
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
        model = network_for(name)
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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", PREDICTORS)
def test_cuda_tensors_stay_there_and_agree(name):
    kind, arguments, give = PREDICTORS[name]
    X, y = data(dtype=torch.float64)
    cp = give(kind(network_for(name, dtype=torch.float64).cuda(), **arguments), X.cuda(), y.cuda())
    result = cp.predict_interval(X.cuda(), LEVELS)
    assert result.intervals.is_cuda
    expected = build(name, dtype=torch.float64).predict_interval(X, LEVELS).intervals
    found = result.intervals.cpu()
    if name in ON_A_GRID:  # where scores tie, a candidate is in or out by the last bit
        steps = (found - expected).abs() / float(cp.grid_.diff().max())
        assert float(steps.max()) < 1.001
        assert float((steps > 1e-8).double().mean()) < 0.02
    else:
        # Conjugate gradients, which refine approximate curvature, stop at a gradient of a millionth.
        close = 1e-5 if name.startswith("refined") and name != "refined split" else 1e-8
        torch.testing.assert_close(found, expected, rtol=close, atol=close)
