"""l2 scaled by leave-one-out residuals, against explicit refits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fullcp
from fullcp.tuning.leave_one_out import SCALES
from reference import ridge
from test_membership import linear_model


@pytest.mark.parametrize(("N", "D"), [(40, 6), (20, 30)])
@pytest.mark.parametrize("seed", range(4))
def test_the_scale_has_the_smallest_leave_one_out_residuals(N, D, seed):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(N, D))
    y = X @ rng.normal(size=D) * 10.0 ** (seed - 2) + rng.normal(size=N)
    model = linear_model(rng.normal(size=D))
    base = fullcp.FullConformalRegressor(model, "full").conformalize(X, y).tuning_
    cp = fullcp.JackknifePlusRegressor(model, "full", l2="leave_one_out", refine=True).conformalize(X, y)
    means = []
    for scale in SCALES:
        l2 = np.full(D, scale * base.l2.item())
        fits = [ridge(np.delete(X, i, 0), np.delete(y, i)[:, None], l2)[:, 0] for i in range(N)]
        means.append(np.mean([abs(y[i] - X[i] @ theta) for i, theta in enumerate(fits)]))
    best = SCALES[int(np.argmin(means))]
    assert cp.tuning_.scale == best
    np.testing.assert_allclose(cp.tuning_.l2, best * base.l2)
    assert np.abs(cp.leave_one_out_residuals_).mean() == pytest.approx(min(means))


def test_predictors_take_it_and_files_keep_it(tmp_path):
    torch.manual_seed(0)
    X = torch.randn(60, 3)
    y = X[:, 0] + 0.3 * torch.randn(60)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    for curvature in ("full", "last_layer"):
        cp = fullcp.InformedSplitConformalRegressor(model, curvature, l2="leave_one_out")
        cp.fit(X[:40], y[:40]).conformalize(X[40:], y[40:])
        assert cp.tuning_.scale in SCALES
        given = fullcp.InformedSplitConformalRegressor(model, curvature, l2=cp.tuning_.l2)
        given.fit(X[:40], y[:40]).conformalize(X[40:], y[40:])
        torch.testing.assert_close(given.predict_interval(X).intervals, cp.predict_interval(X).intervals)
        cp.save(tmp_path / "cp")
        assert type(cp).load(tmp_path / "cp", model).tuning_.scale == cp.tuning_.scale


@pytest.mark.parametrize("curvature", ["kfac", "diagonal", "low_rank:5"])
def test_approximations_are_refused(curvature):
    with pytest.raises(ValueError, match=r"l2='leave_one_out' needs exact curvature"):
        fullcp.FullConformalRegressor(torch.nn.Linear(3, 1), curvature, l2="leave_one_out").conformalize(
            torch.randn(30, 3), torch.randn(30)
        )
