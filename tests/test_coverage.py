"""Guaranteed coverage, by simulation: split + refine and the split methods on exchangeable data."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import binom
from torch import nn

import fullcp
from fullcp.evaluation import coverage_band
from fullcp.inputs import read_levels
from fullcp.regions import absolute_rank, signed_ranks

LEVELS = [0.8, 0.9, 0.95]
ROWS = 59


def sample(rows, generator):
    """Heteroscedastic, heavy-tailed targets that no network here fits well."""
    X = torch.randn(rows, 3, generator=generator, dtype=torch.float64)
    heavy = (
        torch.randn(rows, generator=generator, dtype=torch.float64)
        / torch.rand(rows, generator=generator, dtype=torch.float64).sqrt()
    )
    return X, torch.sin(3 * X[:, 0]) + X[:, 1] * X[:, 2] + (0.2 + X[:, 0].abs()) * heavy


def light(rows, generator):
    """The same without heavy tails or changing noise: what no method should have trouble with."""
    X = torch.randn(rows, 3, generator=generator, dtype=torch.float64)
    return X, X[:, 0] + 0.3 * torch.randn(rows, generator=generator, dtype=torch.float64)


def trained(steps):
    """A network after some steps on its own data: none is a random one, many overfit the 40 rows."""
    torch.manual_seed(steps)
    model = nn.Sequential(nn.Linear(3, 12), nn.GELU(), nn.Linear(12, 1)).double()
    X, y = sample(40, torch.Generator().manual_seed(99))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(steps):
        optimizer.zero_grad()
        (model(X)[:, 0] - y).square().mean().backward()
        optimizer.step()
    return model, X, y


def predictor(kind, model, X, y, residuals):
    if kind == "refined split":
        return fullcp.RefinedSplitConformalRegressor(model, l2=0.3, residuals=residuals)
    if kind == "normalized split":
        return fullcp.NormalizedSplitConformalRegressor(model, l2=0.3, residuals=residuals).fit(X, y)
    if kind == "residual fit":
        return fullcp.ResidualConformalRegressor(model, beta=0.1, residuals=residuals, epochs=100).fit(X, y)
    return fullcp.SplitConformalRegressor(model, residuals=residuals)


@pytest.mark.parametrize("residuals", ["absolute", "signed"])
@pytest.mark.parametrize("steps", [0, 400])
@pytest.mark.parametrize("kind", ["refined split", "normalized split", "residual fit", "split"])
def test_coverage_of_single_points_is_exactly_binomial(kind, steps, residuals):
    """One test point a data set: with continuous targets each is covered with probability k / (N + 1), no more."""
    cp = predictor(kind, *trained(steps), residuals)
    repeats = 400
    p = np.empty(repeats)
    generator = torch.Generator().manual_seed(7)
    for i in range(repeats):
        X, y = sample(ROWS + 1, generator)
        cp.conformalize(X[1:], y[1:])
        p[i] = cp.p_value(X[:1], y[:1])[0]
    check_binomial(p, ROWS, residuals)


@pytest.mark.parametrize("steps", [0, 400])
def test_mean_coverage_of_split_and_refine_lies_in_its_band(steps):
    """200 data sets, 50 test points each."""
    cp = predictor("refined split", *trained(steps), "absolute")
    repeats, points = 200, 50
    covered = np.zeros((repeats, len(LEVELS)))
    generator = torch.Generator().manual_seed(11)
    for i in range(repeats):
        X, y = sample(ROWS + points, generator)
        intervals = cp.conformalize(X[:ROWS], y[:ROWS]).predict_interval(X[ROWS:], LEVELS).intervals
        target = y[ROWS:, None]
        covered[i] = ((intervals[:, 0] <= target) & (target <= intervals[:, 1])).double().mean(0)
    for level, mean in zip(LEVELS, covered.mean(0)):
        low, high = coverage_band(ROWS, points, level, (0.001, 0.999), repeats)
        assert low <= mean <= high


@pytest.mark.parametrize("residuals", ["absolute", "signed"])
@pytest.mark.parametrize(
    ("curvature", "steps", "draw"),
    [
        ("full", 0, sample),
        ("full", 400, light),
        ("full", 4000, sample),
        ("kfac", 400, sample),
        ("last_layer", 400, light),
    ],
)
def test_coverage_of_the_informed_split_is_exactly_binomial(curvature, steps, draw, residuals):
    """500 data sets: a random network, one that overfits, one that has learned its 40 rows by heart.

    The network saw heavy-tailed, heteroscedastic rows; calibration rows and test points are like them, or are quite
    unlike them (the guarantee asks nothing of the training rows), and no network is near a minimum.
    """
    model, X, y = trained(steps)
    cp = fullcp.InformedSplitConformalRegressor(model, curvature, l2=0.3, residuals=residuals).fit(X, y)
    repeats, N = 500, 39
    p = np.empty(repeats)
    generator = torch.Generator().manual_seed(17)
    for i in range(repeats):
        X, y = draw(N + 1, generator)
        p[i] = cp.conformalize(X[1:], y[1:]).p_value(X[:1], y[:1])[0]
    check_binomial(p, N, residuals)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [0, 400, 4000])
def test_mean_coverage_of_the_informed_split_lies_in_its_band(steps):
    """500 data sets, 100 test points each; training and tuning rows drawn anew in each, as calibration rows are."""
    model = trained(steps)[0]
    repeats, points = 500, 100
    covered = np.zeros((repeats, len(LEVELS)))
    generator = torch.Generator().manual_seed(19)
    for i in range(repeats):
        X, y = sample(40 + ROWS + points, generator)
        cp = fullcp.InformedSplitConformalRegressor(model).fit(X[:40], y[:40])
        cp.conformalize(X[40 : 40 + ROWS], y[40 : 40 + ROWS])
        intervals, target = cp.predict_interval(X[40 + ROWS :], LEVELS).intervals, y[40 + ROWS :, None]
        covered[i] = ((intervals[:, 0] <= target) & (target <= intervals[:, 1])).double().mean(0)
    for level, mean in zip(LEVELS, covered.mean(0)):
        low, high = coverage_band(ROWS, points, level, (0.001, 0.999), repeats)
        assert low <= mean <= high


def check_binomial(p, rows, residuals):
    """With continuous targets, each level covers with probability k / (N + 1), no more."""
    for level in read_levels(LEVELS):
        if residuals == "absolute":
            expected = absolute_rank(level, rows) / (rows + 1)
        else:
            low, high = signed_ranks(level, rows)
            expected = (high - low) / (rows + 1)
        covered = int((p > float(1 - level) + 1e-12).sum())
        assert binom.ppf(0.0005, len(p), expected) <= covered <= binom.ppf(0.9995, len(p), expected)


@pytest.mark.parametrize("epochs", [1, 400])
def test_coverage_of_quantile_regression(epochs):
    """Each level alone covers with probability k / (N + 1); levels made to nest with no less."""
    _, X, y = trained(0)
    repeats = 400
    alone = [fullcp.ConformalizedQuantileRegressor(confidence_level=level, epochs=epochs).fit(X, y) for level in LEVELS]
    together = fullcp.ConformalizedQuantileRegressor(confidence_level=LEVELS, epochs=epochs).fit(X, y)
    covered = np.zeros((2, len(LEVELS)), int)
    generator = torch.Generator().manual_seed(13)
    for _ in range(repeats):
        X, y = sample(ROWS + 1, generator)
        p = together.conformalize(X[1:], y[1:]).p_value(X[:1], y[:1])
        for j, (level, cp) in enumerate(zip(LEVELS, alone)):
            low, high = cp.conformalize(X[1:], y[1:]).predict_interval(X[:1], level).intervals[0, :, 0]
            covered[:, j] += [int(low <= y[0] <= high), int(p > 1 - level + 1e-12)]
    for (single, nested), level in zip(covered.T, read_levels(LEVELS)):
        expected = absolute_rank(level, ROWS) / (ROWS + 1)
        assert binom.ppf(0.0005, repeats, expected) <= single <= binom.ppf(0.9995, repeats, expected)
        assert binom.ppf(0.0005, repeats, expected) <= nested
