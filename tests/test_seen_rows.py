"""A guaranteed method that calibrates on the rows of its fit says so; one that does not, does not."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

import fullcp
from fullcp.inputs import ModelTraits, read_rows
from fullcp.predictors.seen import row_marks

X = np.random.default_rng(0).standard_normal((60, 3))
Y = X.sum(1) + 0.1 * np.random.default_rng(1).standard_normal(60)


def methods():
    net = torch.nn.Linear(3, 1)
    return [
        fullcp.InformedSplitConformalRegressor(net, l2=1.0),
        fullcp.NormalizedSplitConformalRegressor(net, l2=1.0),
        fullcp.ResidualConformalRegressor(net, epochs=3),
        fullcp.ConformalizedQuantileRegressor(confidence_level=0.8, epochs=3),
    ]


@pytest.mark.parametrize("which", range(4))
def test_rows_of_the_fit_are_noticed(which):
    fitted = methods()[which].fit(X[:40], Y[:40])
    with pytest.warns(fullcp.SeenRowsWarning, match="40 of 40 calibration rows were given to fit") as caught:
        fitted.conformalize(X[:40], Y[:40])
    assert caught[0].filename == __file__
    order = np.r_[30:40, 0:9, 45:50]  # another order, and some new ones: 19 of 24
    with pytest.warns(fullcp.SeenRowsWarning, match="19 of 24 calibration"):
        fitted.conformalize(X[order], Y[order])
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.from_numpy(X[:40]).float(), torch.from_numpy(Y[:40])), batch_size=7
    )
    with pytest.warns(fullcp.SeenRowsWarning, match="40 of 40"):
        fitted.conformalize(loader)


@pytest.mark.parametrize("which", range(4))
def test_other_rows_are_not(which):
    fitted = methods()[which].fit(X[:40], Y[:40])
    new = np.r_[38:60]  # a data set repeats some of its rows
    with warnings.catch_warnings():
        warnings.simplefilter("error", fullcp.SeenRowsWarning)
        fitted.conformalize(X[new], Y[new])
        fitted.conformalize(X[:40], Y[:40] + 1e-9)  # the same inputs with labels of their own


def test_marks_tell_rows_apart_by_any_bit(tmp_path):
    traits = ModelTraits(torch.device("cpu"), torch.float32)
    rows = read_rows(X, Y, traits)
    marks = row_marks(rows)
    assert marks.dtype == torch.int64
    assert len(set(marks.tolist())) == 60
    np.save(tmp_path / "x.npy", X)
    stored = read_rows(np.load(tmp_path / "x.npy", mmap_mode="r"), Y, traits, memory=2**20)
    assert torch.equal(row_marks(stored), marks)
    moved = X.astype(np.float32)
    moved[7, 1] = np.nextafter(moved[7, 1], np.float32(9))
    assert (row_marks(read_rows(moved, Y, traits)) != marks).nonzero().tolist() == [[7]]
    swapped = X[:, [1, 0, 2]]
    assert not torch.isin(row_marks(read_rows(swapped, Y, traits)), marks).any()
    for dtype in (torch.bfloat16, torch.float64, torch.int64, torch.uint8):
        values = read_rows(
            torch.arange(12).reshape(6, 2).to(dtype), np.zeros(6), ModelTraits(torch.device("cpu"), dtype)
        )
        assert len(set(row_marks(values).tolist())) == 6
