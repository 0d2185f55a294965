"""Bad input is refused with the argument's name, what was found and what is wanted."""

from __future__ import annotations

import warnings
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.sparse import csr_matrix
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fullcp
from fullcp.inputs import read_levels
from fullcp.memory import parse_memory

X, y = np.random.default_rng(0).normal(size=(30, 3)), np.random.default_rng(1).normal(size=30)
NAN, INF = float("nan"), float("inf")


def spoiled(array, value, row=4):
    array = array.copy()
    array[row] = value
    return array


def full(**changes):
    return fullcp.FullConformalRegressor(changes.pop("model", nn.Linear(3, 1)), **changes)


@pytest.mark.parametrize(
    ("X_bad", "y_bad", "error", "words"),
    [
        (spoiled(X, NAN), y, ValueError, r"X contains NaN or infinite values in 1 row\(s\), the first is row 4"),
        (spoiled(X, INF), y, ValueError, "X contains NaN or infinite"),
        (X, spoiled(y, NAN), ValueError, "y contains NaN or infinite values .* row 4"),
        (X, y[:-1], ValueError, "X and y must have the same length, got 30 and 29"),
        (X[0], y, ValueError, r"X must have one row an example, got shape \(3,\); .*reshape"),
        (X[:, :2], y, ValueError, r"X: the model cannot process rows of shape \(2,\)"),
        (X, np.stack([y, y], 1), ValueError, r"y has 2 column\(s\), the model has 1 output"),
        (X, y[:, None, None], ValueError, r"y must have shape \(n,\) or \(n, outputs\), got \(30, 1, 1\)"),
        (X[:0], y[:0], ValueError, "X is empty"),
        (X, y[:0], ValueError, "y is empty"),
        (X[:1], y[:1], ValueError, "X has 1 row, at least 2 are needed"),
        ("text", y, TypeError, "X must be an array, tensor, frame or DataLoader of numbers, got str"),
        ([["a", "b", "c"]] * 30, y, TypeError, "X must be real numbers, got an array of dtype <U1"),
        (X, ["a"] * 30, TypeError, "y must be real numbers"),
        (X, [object()] * 30, TypeError, "y must hold numbers only"),
        (X.astype(complex), y, TypeError, "X must be real numbers, got an array of dtype complex128"),
        (
            torch.zeros(30, 3, dtype=torch.cfloat),
            y,
            TypeError,
            "X must be real numbers, got a tensor of torch.complex64",
        ),
        (X, y > 0, TypeError, "y must be numbers to regress on, got true and false"),
        (X, (y > 0).tolist(), TypeError, "y must be numbers to regress on"),
        (X, (y > 0).astype(object), TypeError, "y must be numbers to regress on"),
        (X, pd.DataFrame({"y": y > 0}), TypeError, "y must be numbers to regress on"),
        (X, torch.from_numpy(y > 0), TypeError, "y must be numbers to regress on"),
        (X, pd.Series(["1"] * 30), TypeError, "y must "),
        (pd.DataFrame({"a": pd.date_range("2020", periods=30)}), y, TypeError, "not numbers: a"),
        (pd.DataFrame({"a": y + 1j}), y, TypeError, "not numbers: a"),
        (pd.DataFrame({"a": ["1"] * 30}), y, TypeError, "not numbers: a"),
        (torch.zeros(30, 3, dtype=torch.long), y, ValueError, r"use X.float\(\)"),
        (
            pd.DataFrame({"a": y, "b": y, "c": pd.array([1, None] * 15, dtype="Int64")}),
            y,
            ValueError,
            "X contains NaN .* row 1",
        ),
        (X, pd.Series(pd.array([1, None] * 15, dtype="Int64")), ValueError, "y contains NaN"),
        ([[1.0, 2.0], [1.0]], y, ValueError, "X cannot be made into an array"),
        (None, y, TypeError, "X must be an array, tensor, frame or DataLoader"),
        (X, None, TypeError, "y is missing"),
        ({"a": 1}, y, TypeError, "X must be an array, .* got dict"),
        (pd.DataFrame({"a": y, "b": "text"}), y, TypeError, "X has columns that are not numbers: b"),
        (torch.zeros(30, 3, device="meta"), y, ValueError, "X is on meta, the model on cpu"),
    ],
)
def test_data(X_bad, y_bad, error, words):
    with pytest.raises(error, match=words):
        full().conformalize(X_bad, y_bad)


@pytest.mark.parametrize(
    ("loader", "error", "words"),
    [
        (DataLoader(torch.randn(30, 3)), TypeError, r"the DataLoader must yield \(inputs, targets\), got 1 part"),
        (
            DataLoader(TensorDataset(torch.empty(0, 3), torch.empty(0))),
            ValueError,
            "X is empty: the DataLoader yields no",
        ),
        (DataLoader([{"x": 1.0}] * 4), TypeError, r"\(inputs, targets\), got 1 part"),
        (DataLoader([("a", "b")] * 4), TypeError, "the DataLoader must yield tensors"),
    ],
)
def test_loaders(loader, error, words):
    with pytest.raises(error, match=words):
        full().conformalize(loader)
    with pytest.raises(TypeError, match="y must be left out when X is a DataLoader"):
        full().conformalize(loader, y)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"score": "student"}, ValueError, "score must be one of 'auto', 'standard', .*, got 'student'"),
        ({"score": None}, ValueError, "score must be one of"),
        ({"residuals": "both"}, ValueError, "residuals must be one of 'auto', 'absolute', 'signed', got 'both'"),
        ({"curvature": "low_rank:many"}, ValueError, "curvature must have a whole number .*, got 'low_rank:many'"),
        ({"curvature": "fisher"}, ValueError, "curvature must be one of 'auto', 'full', .*, got 'fisher'"),
        ({"refine": "yes"}, TypeError, "refine must be True or False, got 'yes'"),
        ({"l2": -1.0}, ValueError, "l2 must be finite and not negative, got -1"),
        ({"l2": NAN}, ValueError, "l2 must be finite"),
        ({"l2": INF}, ValueError, "l2 must be finite"),
        ({"l2": [1.0, 2.0, 3.0]}, ValueError, r"l2 must be one number, 2 values .* or 4"),
        ({"l2": "strong"}, ValueError, "l2 must be 'marglik', a number or an array"),
        ({"l2": None}, TypeError, "l2 must be a number"),
        ({"memory": "lots"}, ValueError, "memory must look like '2GB'"),
        ({"memory": 12}, ValueError, "memory must be at least 1MB"),
        ({"memory": None}, TypeError, "memory must be a string"),
        ({"model": lambda x: x}, TypeError, "model must be a torch.nn.Module, got function"),
        ({"model": nn.Identity()}, ValueError, "model has no parameter with requires_grad"),
        ({"model": nn.Linear(3, 1).requires_grad_(False)}, ValueError, "model has no parameter with requires_grad"),
        ({"model": nn.Linear(3, 1, device="meta")}, ValueError, "model is on the meta device"),
        ({"model": nn.LazyLinear(1)}, ValueError, "'weight' is not initialised yet"),
        ({"model": nn.Sequential(nn.Linear(3, 1), nn.Linear(1, 1, device="meta"))}, ValueError, "one device"),
    ],
)
def test_settings(changes, error, words):
    cp = full(**changes)
    with pytest.raises(error, match=words):
        cp.conformalize(X, y)
    assert not hasattr(cp, "network_")


def test_columns_of_frames_keep_their_names_and_order():
    frame = pd.DataFrame(X, columns=["a", "b", "c"])
    for cp in (full(), fullcp.SplitConformalRegressor(nn.Linear(3, 1))):
        cp.conformalize(frame, y)
        with pytest.raises(ValueError, match="X has columns in another order: c, b, a; expected a, b, c"):
            cp.predict_interval(frame[["c", "b", "a"]])
        with pytest.raises(ValueError, match="X has columns of other names: a, b, d"):
            cp.predict_interval(frame.rename(columns={"c": "d"}))
        assert np.array_equal(cp.predict(frame), cp.predict(X))


def test_true_and_false_are_numbers_in_inputs():
    frame = pd.DataFrame({"a": y > 0, "b": y, "c": [1, 0] * 15})
    expected = full(model=(model := nn.Linear(3, 1))).conformalize(frame.astype(float), y).predict(frame.astype(float))
    for form in (frame, frame.astype(object), frame.astype({"a": "boolean", "c": "Int64"})):
        assert np.array_equal(full(model=model).conformalize(form, y).predict(form), expected)
    assert full().conformalize(torch.from_numpy(X > 0), y).predict(X > 0).shape == (30,)


def test_unusual_arrays():
    expected = full(model=(model := nn.Linear(3, 1))).conformalize(X, y).predict(X)
    record = np.zeros(30, dtype=[("pad", "i1"), ("x", "f8", (3,))])
    record["x"] = X
    for form in (X.astype(np.longdouble), X.astype(">f8"), record["x"], X[::-1][::-1], np.asfortranarray(X)):
        np.testing.assert_allclose(full(model=model).conformalize(form, y).predict(form), expected, atol=1e-6)
    masked = np.ma.MaskedArray(X, mask=np.zeros_like(X, dtype=bool))
    np.testing.assert_allclose(full(model=model).conformalize(masked, y).predict(masked), expected)
    masked.mask[7, 1] = True
    with pytest.raises(ValueError, match=r"X contains NaN .* row 7"):
        full().conformalize(masked, y)


def test_loaders_whose_rows_nobody_could_tell_apart():
    data = TensorDataset(torch.from_numpy(X).float(), torch.from_numpy(y).float())
    cp = full().conformalize(DataLoader(data, batch_size=8, shuffle=True))
    with pytest.raises(ValueError, match="X: the DataLoader shuffles"):
        cp.predict(DataLoader(data, batch_size=8, shuffle=True))
    with pytest.raises(TypeError, match="X: the DataLoader must yield batches, give it a batch_size"):
        full().conformalize(DataLoader(data, batch_size=None))


@pytest.mark.parametrize(
    ("level", "fraction"),
    [
        (0.9, "9/10"),
        (5 / 6, "5/6"),
        (19 * 0.05, "19/20"),
        (1 - 0.1 / 4, "39/40"),
        (np.float32(0.95), "19/20"),
        (np.array(0.9), "9/10"),
        (torch.tensor(0.9, dtype=torch.float64), "9/10"),
        (Fraction(2, 3), "2/3"),
        (Decimal("0.99"), "99/100"),
        (0.9999999, "9999999/10000000"),
        (1e-16, "1/10000000000000000"),
        (1 - 1e-16, "9999999999999999/10000000000000000"),
    ],
)
def test_levels_are_the_numbers_that_were_meant(level, fraction):
    assert read_levels(level) == [Fraction(fraction)]
    assert read_levels([level, 0.5]) == [Fraction(fraction), Fraction(1, 2)]


def test_messages_tell_the_way_out():
    class Squeezes(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def forward(self, x):
            return self.layer(x).squeeze()

    with pytest.raises(ValueError, match=r"use squeeze\(-1\) instead"):
        full(model=Squeezes()).conformalize(X, y)


def test_weights_that_are_not_numbers():
    model = nn.Linear(3, 1)
    with torch.no_grad():
        model.weight[0, 1] = NAN
    with pytest.raises(ValueError, match="model parameter 'weight' contains NaN"):
        full(model=model).conformalize(X, y)


@pytest.mark.parametrize(
    ("level", "error", "words"),
    [
        (0.0, ValueError, "confidence_level must lie strictly between 0 and 1, got 0.0"),
        (1.0, ValueError, "strictly between 0 and 1"),
        (90, ValueError, "strictly between 0 and 1, got 90"),
        (-0.1, ValueError, "strictly between 0 and 1"),
        (NAN, ValueError, "strictly between 0 and 1"),
        ([0.9, 1.5], ValueError, "strictly between 0 and 1, got 1.5"),
        ([], ValueError, "confidence_level is empty"),
        ("90%", TypeError, "confidence_level must be a number"),
        (None, TypeError, "confidence_level must be a number"),
        (True, TypeError, "confidence_level must be a number"),
        ([[0.9]], TypeError, "confidence_level must be a number"),
    ],
)
def test_levels(level, error, words):
    cp = full().conformalize(X, y)
    with pytest.raises(error, match=words):
        cp.predict_interval(X, level)
    with pytest.raises(error, match=words):
        cp.predict_set(X, level)


def test_predictions():
    cp = full().conformalize(X, y)
    with pytest.raises(ValueError, match=r"X has rows of shape \(2,\), expected \(3,\)"):
        cp.predict(X[:, :2])
    with pytest.raises(ValueError, match="X contains NaN"):
        cp.predict_interval(spoiled(X, NAN))
    with pytest.raises(ValueError, match="X is empty"):
        cp.predict_interval(X[:0])
    with pytest.raises(ValueError, match="X is on meta, the model on cpu"):
        cp.predict_interval(torch.zeros(4, 3, device="meta"))
    with pytest.raises(ValueError, match="joint must be one of None, 'bonferroni', 'max', got 'min'"):
        cp.predict_interval(X, joint="min")
    with pytest.raises(ValueError, match="a single level here, got 2"):
        cp.predict_set(X, [0.8, 0.9])
    with pytest.raises(ValueError, match=r"y must have shape \(30,\), one label a row of X, got \(29, 1\)"):
        cp.p_value(X, y[:-1])
    with pytest.raises(ValueError, match="y contains NaN"):
        cp.p_value(X, NAN)


def test_normalized_split_order_of_calls():
    cp = fullcp.NormalizedSplitConformalRegressor(nn.Linear(3, 1))
    with pytest.raises(fullcp.NotFittedError, match="call fit"):
        cp.conformalize(X, y)
    cp.fit(X, y)
    with pytest.raises(fullcp.NotFittedError, match="first"):
        cp.predict(X)
    with pytest.raises(ValueError, match="rows of shape"):
        cp.conformalize(X[:, :2], y)
    cp.conformalize(X, -y)
    cp.fit(X, y)  # calibration on the old curvature is void
    with pytest.raises(fullcp.NotFittedError, match="first"):
        cp.predict(X)


@pytest.mark.parametrize(
    ("noise", "error"),
    [(0.0, ValueError), (-1.0, ValueError), (INF, ValueError), ("loud", TypeError), (True, TypeError)],
)
def test_noise(noise, error):
    with pytest.raises(error, match="noise must be"):
        fullcp.LaplaceRegressor(nn.Linear(3, 1), noise=noise).fit(X, y)


def test_files(tmp_path):
    cp = full().conformalize(X, y)
    with pytest.raises(ValueError, match="path lies in a folder that does not exist"):
        cp.save(tmp_path / "nowhere" / "cp")
    with pytest.raises(ValueError, match="path is a folder"):
        cp.save(tmp_path)
    with pytest.raises(FileNotFoundError):
        fullcp.FullConformalRegressor.load(tmp_path / "cp", cp.model)
    (tmp_path / "junk").write_bytes(b"no tensors here, only words")
    with pytest.raises(ValueError, match="path is no fullcp file"):
        fullcp.FullConformalRegressor.load(tmp_path / "junk", cp.model)
    with pytest.raises(fullcp.NotFittedError):
        full().save(tmp_path / "early")
    assert [f.name for f in tmp_path.iterdir()] == ["junk"]


@pytest.mark.parametrize(
    ("memory", "size"), [("2GB", 2 * 10**9), ("1.5 mb", 1_500_000), ("1GiB", 2**30), (10**7, 10**7)]
)
def test_memory_is_read(memory, size):
    assert parse_memory(memory) == size


def test_what_is_no_array():
    cp = fullcp.SplitConformalRegressor(nn.Linear(3, 1))
    data = TensorDataset(torch.from_numpy(X).float(), torch.from_numpy(y).float())
    with pytest.raises(TypeError, match=r"X must be an array, .* got TensorDataset: wrap it in a .*DataLoader"):
        cp.conformalize(data)
    with pytest.raises(TypeError, match="X must be an array, tensor, frame or DataLoader, got generator"):
        cp.conformalize((row for row in X), y)
    with pytest.raises(TypeError, match=r"X is sparse, Tensor: .* pass X.to_dense\(\)"):
        cp.conformalize(torch.from_numpy(X).to_sparse(), y)
    with pytest.raises(TypeError, match=r"X is sparse, csr_matrix: .* pass X.toarray\(\)"):
        cp.conformalize(csr_matrix(X), y)
    with pytest.raises(ValueError, match=r"strictly between 0 and 1, got 90: 90 % is 0.9"):
        cp.conformalize(X, y).predict_interval(X, 90)


def test_a_loader_that_drops_rows():
    data = TensorDataset(torch.from_numpy(X).float(), torch.from_numpy(y).float())
    cp = fullcp.SplitConformalRegressor(nn.Linear(3, 1))
    with pytest.warns(
        UserWarning, match=r"X: the DataLoader has drop_last=True, so 2 of 30 rows are left out"
    ) as caught:
        cp.conformalize(DataLoader(data, batch_size=7, drop_last=True))
    assert caught[0].filename == __file__
    assert cp.n_rows_ == 28
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", fullcp.PoorFitWarning)
        cp.conformalize(DataLoader(data, batch_size=10, drop_last=True))
