"""The same fit with another score: as if it had been made with that score."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import fullcp
from predictor_cases import data, network

KINDS = [fullcp.FullConformalRegressor, fullcp.RefinedSplitConformalRegressor]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("score", ["standard", "deleted", "studentized"])
@pytest.mark.parametrize("residuals", ["absolute", "signed"])
@pytest.mark.filterwarnings("ignore::fullcp.FarFromMinimumWarning")
def test_it_is_the_fit_with_that_score(kind, score, residuals, tmp_path):
    X, y = data(rows=60)
    model = network()
    first = kind(model, l2=0.5).conformalize(X, y)
    before = first.predict_interval(X[:7], [0.5, 0.9]).intervals
    twin = first.with_score(score, residuals)
    made = kind(model, "auto", score, residuals, 0.5).conformalize(X, y)
    expected = made.predict_interval(X[:7], [0.5, 0.9]).intervals
    torch.testing.assert_close(twin.predict_interval(X[:7], [0.5, 0.9]).intervals, expected, rtol=0, atol=0)
    torch.testing.assert_close(first.predict_interval(X[:7], [0.5, 0.9]).intervals, before, rtol=0, atol=0)
    assert (twin.score_, twin.residuals_, twin.score) == (score, residuals, score)
    twin.save(tmp_path / "twin.safetensors")
    loaded = kind.load(tmp_path / "twin.safetensors", model)
    assert loaded.get_params()["score"] == score
    torch.testing.assert_close(loaded.predict_interval(X[:7], [0.5, 0.9]).intervals, expected, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore::fullcp.FarFromMinimumWarning")
def test_what_is_not_named_stays():
    X, y = data(rows=60)
    cp = fullcp.FullConformalRegressor(network(), score="deleted", residuals="signed", l2=0.5).conformalize(X, y)
    twin = cp.with_score("standard")
    assert (twin.score_, twin.residuals_) == ("standard", "signed")
    assert (cp.with_score().score_, cp.with_score("auto").score_) == ("deleted", "studentized")
    assert cp.with_score(residuals="auto").residuals_ == "absolute"
    with pytest.raises(ValueError, match="score must be"):
        cp.with_score("students")
    with pytest.raises(ValueError, match="call conformalize"):
        fullcp.FullConformalRegressor(nn.Linear(3, 1)).with_score("standard")


def test_scores_that_do_not_exist_are_warned_of():
    X = torch.from_numpy(np.random.default_rng(0).normal(size=(40, 3))).float()
    y = X.sum(1)
    model = nn.Sequential(nn.Linear(3, 30), nn.Tanh(), nn.Linear(30, 1))
    cp = fullcp.FullConformalRegressor(model, "diagonal", "standard", l2=1e-6).conformalize(X, y)
    with pytest.warns(fullcp.MissingScoreWarning, match="leverage of 1 or more by curvature='diagonal'"):
        cp.with_score("studentized")
