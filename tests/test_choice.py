"""What curvature="auto", score="auto" and `parameters` come to, and that it is said."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from torch import nn

import fullcp
from fullcp.curvature import choose
from fullcp.curvature.choice import _MOST_WORK
from fullcp.features import select_parameters
from reference import dense_jacobian


class Headed(nn.Module):
    """A body, a head, and something done to what the head gives."""

    def __init__(self, factor=3.0):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 8), nn.Tanh())
        self.head = nn.Linear(8, 1)
        self.factor = factor

    def forward(self, x):
        return self.factor * self.head(self.body(x))


def data(rows=60, seed=0):
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(rows, 3, generator=generator, dtype=torch.float64)
    return X, X.sum(1) + 0.3 * torch.randn(rows, generator=generator, dtype=torch.float64)


def headed(factor=3.0, seed=0):
    torch.manual_seed(seed)
    return Headed(factor).double()


def test_exact_where_it_fits_and_the_next_best_where_not(caplog):
    X, y = data(400)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 100), nn.Tanh(), nn.Linear(100, 1)).double()
    assert choose("auto", model, X, memory=10**8).structure == "full"
    with caplog.at_level(logging.INFO, logger="fullcp"):
        choice = choose("auto", model, X, memory=3 * 8 * 400**2 - 1)
    assert choice.structure == "kfac"
    assert "400 x 400 matrix of curvature='full' takes 3.8 MB, memory is 3.8 MB" in choice.why
    assert choice.why in caplog.text
    cp = fullcp.FullConformalRegressor(model, l2=1.0, memory=10**6).conformalize(X, y)
    assert cp.score_ == "standard"
    assert cp.curvature_.name == "kfac"
    assert "kfac: the 400 x 400 matrix" in repr(cp)
    exact = fullcp.FullConformalRegressor(model, l2=1.0).conformalize(X, y)
    assert exact.score_ == "studentized"
    assert "full: exact" in repr(exact)
    assert "exact" not in repr(fullcp.FullConformalRegressor(model, "full", l2=1.0).conformalize(X, y))


def test_networks_that_kfac_does_not_know():
    X, _ = data(400)
    model = nn.Sequential(nn.Linear(3, 100), nn.PReLU(100), nn.Linear(100, 1)).double()
    assert choose("auto", model, X, memory=10**6).structure == "kfac"  # a small tensor has its exact block

    class Large(nn.Module):
        def __init__(self):
            super().__init__()
            self.W = nn.Parameter(torch.randn(3, 1000, dtype=torch.float64))

        def forward(self, x):
            return torch.tanh(x @ self.W).sum(1)

    choice = choose("auto", Large(), X, memory=10**6)
    assert choice.structure == "low_rank"
    assert "W belongs to a module of type Large" in choice.why


def test_low_rank_where_the_factors_of_kfac_do_not_fit_either(monkeypatch):
    """A (900 x 900) takes 6.5 MB, and its decomposition three times that: 26 MB with the rest."""
    X = torch.randn(1500, 900)
    model = nn.Sequential(nn.Linear(900, 4), nn.Tanh(), nn.Linear(4, 1))
    for memory, structure in ((25 * 10**6, "low_rank"), (27 * 10**6, "kfac")):
        choice = choose("auto", model, X, memory=memory)
        assert choice.structure == structure
    choice = choose("auto", model, X, memory=10**7)
    assert "memory is 10 MB; factors of KFAC, up to 900 x 900, take 26 MB" in choice.why
    cp = fullcp.FullConformalRegressor(model, l2=1e4, memory=10**7).conformalize(X, torch.randn(1500))
    assert cp.curvature_.name.startswith("low rank")
    assert cp.predict_interval(X[:5]).intervals.isfinite().all()
    monkeypatch.setitem(_MOST_WORK, "cpu", 5e9)
    choice = choose("auto", model, X, memory=27 * 10**6)
    assert choice.structure == "low_rank"
    assert "KFAC takes 9e+09 multiply-adds" in choice.why


@pytest.mark.parametrize("structure", ["kfac", "diagonal", "low_rank:5"])
def test_approximations_take_the_standard_score(structure):
    X, y = data()
    cp = fullcp.FullConformalRegressor(headed(), structure, l2=1.0).conformalize(X, y)
    plain = fullcp.FullConformalRegressor(headed(), structure, "standard", l2=1.0).conformalize(X, y)
    assert cp.score_ == "standard"
    np.testing.assert_array_equal(cp.predict_interval(X[:5]).intervals, plain.predict_interval(X[:5]).intervals)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("head", ["head.weight", "head.bias"]),
        ("body", ["body.0.weight", "body.0.bias"]),
        ("*.bias", ["body.0.bias", "head.bias"]),
        (["head.bias", "body.0.weight"], ["body.0.weight", "head.bias"]),
        (lambda name, p: p.ndim == 2, ["body.0.weight", "head.weight"]),
        (None, None),
    ],
)
def test_parameters_by_name_or_predicate(asked, expected):
    assert select_parameters(headed(), asked) == expected


@pytest.mark.parametrize(
    ("asked", "error", "message"),
    [
        ("tail", ValueError, "'tail' names no parameter .* there are body.0.weight"),
        (["head", "hea"], ValueError, "'hea' names no parameter"),
        ([], ValueError, "parameters is empty"),
        (lambda name, p: False, ValueError, "the predicate chooses none"),
        (3, TypeError, "must be names or a callable, got int"),
        (["head", 3], TypeError, "got one int"),
        ("body", ValueError, "none of which has requires_grad"),
    ],
)
def test_parameters_that_cannot_be(asked, error, message):
    model = headed()
    model.body.requires_grad_(False)
    X, y = data()
    kinds = (
        fullcp.FullConformalRegressor,
        fullcp.RefinedSplitConformalRegressor,
        fullcp.GridFullConformalRegressor,
    )
    for kind in kinds:
        with pytest.raises(error, match=message):
            kind(model, parameters=asked).conformalize(X, y)
    for kind in (fullcp.NormalizedSplitConformalRegressor, fullcp.LaplaceRegressor):
        with pytest.raises(error, match=message):
            kind(model, parameters=asked).fit(X, y)


def test_named_parameters_are_those_of_a_frozen_rest():
    """Naming parameters equals freezing the others, for every predictor with curvature, saved and loaded too."""
    X, y = data()
    frozen = headed()
    frozen.body.requires_grad_(False)
    for kind in (
        fullcp.FullConformalRegressor,
        fullcp.RefinedSplitConformalRegressor,
        fullcp.GridFullConformalRegressor,
        fullcp.NormalizedSplitConformalRegressor,
        fullcp.LaplaceRegressor,
    ):
        ends = []
        for model, parameters in ((frozen, None), (headed(), "head"), (headed(), lambda name, p: "head" in name)):
            cp = kind(model, l2=0.5, parameters=parameters)
            cp = cp.fit(X, y) if hasattr(cp, "fit") else cp
            cp = cp.conformalize(X, y) if hasattr(cp, "conformalize") else cp
            ends.append(cp.predict_interval(X[:7]).intervals)
        for found in ends[1:]:
            torch.testing.assert_close(found, ends[0])


@pytest.mark.parametrize("parameters", ["head", ["head.weight"], lambda name, p: "head" in name])
def test_named_parameters_are_saved(parameters, tmp_path):
    X, y = data()
    model = headed()
    cp = fullcp.FullConformalRegressor(model, l2=0.5, parameters=parameters).conformalize(X, y)
    cp.save(tmp_path / "cp.safetensors")
    loaded = fullcp.FullConformalRegressor.load(tmp_path / "cp.safetensors", model)
    np.testing.assert_array_equal(loaded.predict_interval(X).intervals, cp.predict_interval(X).intervals)
    assert select_parameters(model, loaded.parameters) == select_parameters(model, parameters)
    assert loaded.curvature_choice_ == cp.curvature_choice_
    assert loaded.score_ == "studentized"


def test_a_last_layer_can_be_named():
    """Where something is done to what it gives, by the exact matrix of its parameters; else by the shorter way."""
    X, y = data()
    model = headed()
    with pytest.raises(ValueError, match=r"name the layer, such as parameters='head'"):
        fullcp.FullConformalRegressor(model, "last_layer").conformalize(X, y)
    cp = fullcp.FullConformalRegressor(model, "last_layer", l2=0.7, parameters="head").conformalize(X, y)
    phi = dense_jacobian(model, X)[1][:, 0, -9:]
    expected = torch.linalg.solve(phi.T @ phi + 0.7 * torch.eye(9, dtype=torch.float64), phi.T)
    torch.testing.assert_close(torch.from_numpy(cp.leverages_), (phi * expected.T).sum(1))
    assert "not those of the layer that gives" in cp.curvature_choice_
    plain = nn.Sequential(model.body, model.head)
    found = [
        fullcp.FullConformalRegressor(plain, "last_layer", l2=0.7, parameters=p).conformalize(X, y) for p in (None, "1")
    ]
    assert all(cp.curvature_.name.startswith("last layer") for cp in found)
    np.testing.assert_array_equal(found[0].leverages_, found[1].leverages_)
