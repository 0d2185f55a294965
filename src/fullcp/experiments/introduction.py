"""The paper's first figure, for real: intervals in one dimension, scores against the label, the p-value staircase."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from fullcp.data import Standardizer, halves, one_dimensional
from fullcp.predictors import FullConformalRegressor, LaplaceRegressor, PredictionIntervals, SplitConformalRegressor
from fullcp.training import mlp, train

Array = NDArray[np.float64]
L2 = 0.005
STORY_X = 0.2  # inside the gap of the data


@dataclass(frozen=True)
class ScoreStory:
    """What happens at one test point x as its candidate label moves.

    `training` (N, K) and `new` (K,) are scores at the labels (K,); `p` their p-values; `pieces` the prediction set.
    """

    x: float
    labels: Array
    training: Array
    new: Array
    changepoints: Array
    p: Array
    pieces: list[tuple[float, float]]


@dataclass(frozen=True)
class Introduction:
    """Everything the figure shows."""

    x: Array
    y: Array
    grid: Array
    full: PredictionIntervals
    split: PredictionIntervals
    laplace: PredictionIntervals
    story: ScoreStory
    level: float


def run(*, level: float = 0.9, rows: int = 60, story_rows: int = 14, epochs: int = 1500, seed: int = 0) -> Introduction:
    """Train on the one-dimensional example and collect what there is to see."""
    raw_x, raw_y = one_dimensional(rows, seed=seed)
    x_scale, y_scale = Standardizer.of(raw_x), Standardizer.of(raw_y)
    x, y = x_scale.transform(raw_x), y_scale.transform(raw_y)
    order = np.random.default_rng(seed).permutation(rows)
    fit_rows, cal_rows = halves(order)
    full, half = (_trained(x[part], y[part], epochs, seed) for part in (order, fit_rows))
    grid = np.linspace(raw_x.min() - 1.5, raw_x.max() + 1.5, 301)[:, None]
    scaled = x_scale.transform(grid)

    def back(result: PredictionIntervals) -> PredictionIntervals:
        return PredictionIntervals(y_scale.inverse(result.prediction), y_scale.inverse(result.intervals))

    split = SplitConformalRegressor(half).conformalize(x[cal_rows], y[cal_rows])
    few = order[:story_rows]
    story = _story(_trained(x[few], y[few], epochs, seed), x[few], y[few], level, x_scale, y_scale)
    return Introduction(
        x=raw_x[:, 0],
        y=raw_y,
        grid=grid[:, 0],
        full=back(FullConformalRegressor(full, l2=L2).conformalize(x, y).predict_interval(scaled, level)),
        split=back(split.predict_interval(scaled, level)),
        laplace=back(LaplaceRegressor(full, l2=L2).fit(x, y).predict_interval(scaled, level)),
        story=story,
        level=level,
    )


def _story(
    model: torch.nn.Module, x: Array, y: Array, level: float, x_scale: Standardizer, y_scale: Standardizer
) -> ScoreStory:
    point = x_scale.transform([[STORY_X]])
    cp = FullConformalRegressor(model, l2=L2, residuals="absolute").conformalize(x, y)
    f = float(cp.predict(point)[0])
    A, B, b = (part[0] for part in cp.score_lines(point))
    changes = np.concatenate([A / (b + B), -A / (b - B)])  # where |A_i - B_i r| = b |r|
    pieces = cp.predict_set(point, level)[0]
    reach = 1.3 * max(abs(end - f) for piece in pieces for end in piece)
    r = np.unique(np.concatenate([np.linspace(-reach, reach, 2001), changes[np.abs(changes) < reach]]))
    return ScoreStory(
        x=STORY_X,
        labels=y_scale.inverse(f + r),
        training=y_scale.scale * np.abs(A[:, None] - B[:, None] * r),
        new=y_scale.scale * b * np.abs(r),
        changepoints=np.sort(y_scale.inverse(f + changes)),
        p=cp.p_value(np.repeat(point, len(r), axis=0), f + r),
        pieces=[(float(y_scale.inverse(low)), float(y_scale.inverse(high))) for low, high in pieces],
    )


def _trained(x: Array, y: Array, epochs: int, seed: int) -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = mlp(1, activation=torch.nn.Tanh)
    train(model, x, y, l2=L2, epochs=epochs, seed=seed)
    return model
