"""Measures by hand and by simulation; bands by simulation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import beta, betabinom

from fullcp import evaluation
from fullcp.predictors import PredictionIntervals

INTERVALS = np.array([[0.0, 1.0], [0.0, 2.0], [-1.0, 3.0], [-np.inf, 5.0]])
Y = np.array([1.0, 2.5, 0.0, 9.0])


def test_simple_measures_by_hand():
    assert evaluation.coverage(Y, INTERVALS) == 0.5
    assert evaluation.widths(INTERVALS).tolist() == [1, 2, 4, np.inf]
    assert evaluation.infinite_share(INTERVALS) == 0.25
    assert evaluation.interval_score(Y[:3], INTERVALS[:3], 0.9) == pytest.approx((1 + 2 + 20 * 0.5 + 4) / 3)
    assert evaluation.interval_score(Y, INTERVALS, 0.9) == np.inf
    assert evaluation.volume(np.array([[[0.0, 1.0], [2.0, 4.0]]])).tolist() == [6.0]
    boxes = np.array([[[0.0, 0.0], [1.0, 1.0]], [[0.0, 0.0], [1.0, 1.0]]])
    assert evaluation.joint_coverage(np.array([[0.5, 0.5], [0.5, 2.0]]), boxes) == 0.5


def test_interval_score_prefers_the_true_quantiles():
    rng = np.random.default_rng(0)
    y = rng.normal(size=20000)
    scores = [evaluation.interval_score(y, np.tile([-z, z], (len(y), 1)), 0.9) for z in (1.2, 1.645, 2.2)]
    assert min(scores) == scores[1]


def test_adaptivity():
    rng = np.random.default_rng(0)
    scale = rng.uniform(0.1, 2, size=4000)
    y = scale * rng.normal(size=4000)
    adaptive = np.stack([-1.645 * scale, 1.645 * scale], 1)
    constant = np.tile([-2.0, 2.0], (4000, 1))
    assert evaluation.width_residual_correlation(y, np.zeros(4000), adaptive) > 0.4
    assert np.isnan(evaluation.width_residual_correlation(y, np.zeros(4000), constant))
    # Rounding alone does not make widths differ.
    moved = constant + rng.normal(size=(4000, 1))
    assert np.isnan(evaluation.width_residual_correlation(y, np.zeros(4000), moved))
    np.testing.assert_allclose(evaluation.size_stratified_coverage(y, adaptive), 0.9, atol=0.03)
    backwards = adaptive[np.argsort(np.argsort(-scale))]
    assert (
        evaluation.size_stratified_coverage(y, adaptive).min() > evaluation.size_stratified_coverage(y, backwards).min()
    )


def test_validity_band_is_the_papers():
    low, high = evaluation.validity_band(1000, 0.9)
    l = 100  # floor(1001 * 0.1)
    assert (low, high) == (beta.ppf(0.01, 1001 - l, l), beta.ppf(0.99, 1001 - l, l))
    assert low < 0.9 < high
    assert evaluation.validity_band(8, 0.9) == (1.0, 1.0)
    assert evaluation.validity_band(19, 19 * 0.05) == evaluation.validity_band(19, 0.95)
    assert evaluation.validity_band(5, 5 / 6)[0] < 1


def test_coverage_band_is_beta_binomial():
    low, high = evaluation.coverage_band(100, 37, 0.9)
    a, b = 91, 10
    assert low == betabinom.ppf(0.01, 37, a, b) / 37
    assert high == betabinom.ppf(0.99, 37, a, b) / 37
    rng = np.random.default_rng(0)
    draws = rng.binomial(37, rng.beta(a, b, size=(20000, 5))).mean(1) / 37
    low, high = evaluation.coverage_band(100, 37, 0.9, (0.05, 0.95), repeats=5)
    assert np.mean(draws < low) <= 0.05 + 0.01
    assert np.mean(draws <= low) >= 0.05 - 0.01
    assert np.mean(draws <= high) >= 0.95 - 0.01


def test_coverage_band_of_many_repeats_narrows_around_the_mean():
    low, high = evaluation.coverage_band(1000, 10000, 0.9, repeats=100)
    assert 0.895 < low < 901 / 1001 < high < 0.905


def test_split_coverage_follows_the_band():
    """The law itself: coverage of split-CP on exchangeable data, given the calibration rows."""
    rng = np.random.default_rng(0)
    covered = np.empty(4000)
    for i in range(4000):
        scores = np.abs(rng.normal(size=50 + 30))
        covered[i] = np.mean(scores[50:] <= np.sort(scores[:50])[45])  # k = ceil(0.9 * 51) = 46
    low, high = evaluation.coverage_band(50, 30, 0.9)
    assert np.mean((low <= covered) & (covered <= high)) >= 0.97
    assert covered.mean() == pytest.approx(46 / 51, abs=0.004)


@pytest.mark.parametrize("torch_in", [False, True])
def test_evaluate_takes_results_apart(torch_in):
    rng = np.random.default_rng(0)
    y = rng.normal(size=(50, 2))
    prediction = np.zeros((50, 2))
    widths = np.array([1.0, 2.0, 3.0])
    intervals = np.zeros((50, 2, 3, 2))
    intervals[:, 0], intervals[:, 1] = -widths[:, None], widths[:, None] * np.array([1.0, 2.0])
    result = PredictionIntervals(prediction, intervals)
    if torch_in:
        y, result = torch.from_numpy(y), PredictionIntervals(*(torch.from_numpy(part) for part in result))
    rows = evaluation.evaluate(y, result, [0.7, 0.8, 0.9])
    assert [(row.level, row.output) for row in rows] == [(level, o) for level in (0.7, 0.8, 0.9) for o in (0, 1)]
    assert [row.mean_width for row in rows] == [2, 3, 4, 6, 6, 9]
    assert rows[0].coverage == np.mean(np.abs(np.asarray(y)[:, 0]) <= 1)
    assert set(rows[0].as_dict()) >= {"coverage", "mean_width", "interval_score", "infinite_share"}


def test_bad_input():
    with pytest.raises(ValueError, match=r"intervals must have shape \(4, 2\), got \(3, 2\)"):
        evaluation.coverage(Y, INTERVALS[:3])
    with pytest.raises(ValueError, match="bins must lie between 1 and the number of rows"):
        evaluation.size_stratified_coverage(Y, INTERVALS, bins=5)
    with pytest.raises(ValueError, match="confidence_level has 2 level"):
        evaluation.evaluate(Y, (Y, INTERVALS[..., None]), [0.8, 0.9])
    with pytest.raises(ValueError, match="y must have the shape of the predictions"):
        evaluation.evaluate(Y[:3], (Y, INTERVALS[..., None]), 0.8)
    with pytest.raises(ValueError, match="y contains NaN"):
        evaluation.coverage(np.full(4, np.nan), INTERVALS)
    with pytest.raises(TypeError, match="result must be a pair"):
        evaluation.evaluate(Y, INTERVALS)
    with pytest.raises(TypeError, match="confidence_level is missing"):
        evaluation.evaluate(Y, (Y, INTERVALS[..., None]))
    with pytest.raises(ValueError, match="confidence_level must lie strictly between"):
        evaluation.validity_band(10, 1.2)
