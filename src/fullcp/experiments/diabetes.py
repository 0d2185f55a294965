"""The demo: width and coverage of seven methods on the diabetes data, over a few random splits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from fullcp.data import Standardizer, halves, load_diabetes, random_splits
from fullcp.evaluation import Evaluation, evaluate
from fullcp.predictors import (
    FullConformalRegressor,
    InformedSplitConformalRegressor,
    JackknifePlusRegressor,
    LaplaceRegressor,
    NormalizedSplitConformalRegressor,
    PredictionIntervals,
    Predictor,
    RefinedSplitConformalRegressor,
    SplitConformalRegressor,
)
from fullcp.progress import track
from fullcp.training import mlp, replicate, train_ensemble

Array = NDArray[np.float64]
LEVELS = (0.9, 0.95, 0.99)
Rows = tuple[Array, Array]
L2 = 30.0  # sum scale, standardised units; set by hand for these data


@dataclass(frozen=True)
class Summary:
    """Means over splits of one method at one level, with the standard errors of coverage and width."""

    method: str
    level: float
    coverage: float
    coverage_se: float
    width: float
    width_se: float
    infinite_share: float
    interval_score: float

    def as_dict(self) -> dict[str, str | float]:
        """The row as a dictionary."""
        return asdict(self)


@dataclass(frozen=True)
class _Split:
    """Standardised rows of one split, and the way back."""

    everything: Rows
    fit: Rows
    cal: Rows
    more: Rows  # three quarters to train on, and the quarter left to calibrate
    less: Rows
    test: Rows
    scale: Standardizer


def run(splits: int = 10, *, epochs: int = 300, seed: int = 0) -> list[Summary]:
    """Train the networks of all splits as one ensemble, conformalize by each method, evaluate on the test rows."""
    X, y = load_diabetes()
    parts = [_split(X, y, train_rows, test_rows) for train_rows, test_rows in random_splits(len(X), splits, seed=seed)]
    seeds = [seed + i for i in range(splits) for _ in range(3)]
    models = replicate(lambda: mlp(X.shape[1]), seeds)
    data = [rows for part in parts for rows in (part.everything, part.fit, part.more)]
    train_ensemble(models, data, l2=L2, epochs=epochs, seed=seeds)
    found: dict[str, list[list[Evaluation]]] = {}
    for i, part in enumerate(track(parts, "splits", len(parts))):
        for name, result in _methods(part, *models[3 * i : 3 * i + 3]):
            found.setdefault(name, []).append(evaluate(part.test[1], result, LEVELS))
    return [
        _summarise(name, level, [run[j] for run in runs])
        for name, runs in found.items()
        for j, level in enumerate(LEVELS)
    ]


def _split(X: Array, y: Array, train_rows: NDArray[np.int64], test_rows: NDArray[np.int64]) -> _Split:
    x_scale, y_scale = Standardizer.of(X[train_rows]), Standardizer.of(y[train_rows])
    Z, t = x_scale.transform(X), y_scale.transform(y)
    parts = (train_rows, *halves(train_rows), *halves(train_rows, share=0.25))
    everything, fit, cal, more, less = ((Z[rows], t[rows]) for rows in parts)
    return _Split(everything, fit, cal, more, less, (Z[test_rows], y[test_rows]), y_scale)


def _methods(
    part: _Split, full: torch.nn.Module, half: torch.nn.Module, most: torch.nn.Module
) -> Iterator[tuple[str, PredictionIntervals]]:
    """Each method's intervals on the test rows, in the target's units."""
    makers: dict[str, Callable[[], Predictor]] = {
        "ACP-GN": lambda: FullConformalRegressor(full, l2=L2).conformalize(*part.everything),
        "informed split": lambda: InformedSplitConformalRegressor(most, l2=L2).fit(*part.more).conformalize(*part.less),
        "SCP-GN": lambda: NormalizedSplitConformalRegressor(half, l2=L2).fit(*part.fit).conformalize(*part.cal),
        "SCP": lambda: SplitConformalRegressor(half).conformalize(*part.cal),
        "split + refine": lambda: RefinedSplitConformalRegressor(half, l2=L2).conformalize(*part.cal),
        "jackknife+": lambda: JackknifePlusRegressor(full, l2=L2).conformalize(*part.everything),
        "LA": lambda: LaplaceRegressor(full, l2=L2).fit(*part.everything),
    }
    for name, make in makers.items():
        prediction, intervals = make().predict_interval(part.test[0], LEVELS)
        yield name, PredictionIntervals(part.scale.inverse(prediction), part.scale.inverse(intervals))


def _summarise(method: str, level: float, rows: Sequence[Evaluation]) -> Summary:
    def mean(name: str) -> float:
        return float(np.mean([getattr(row, name) for row in rows]))

    def error(name: str) -> float:
        if len(rows) < 2:
            return float("nan")
        return float(np.std([getattr(row, name) for row in rows], ddof=1) / np.sqrt(len(rows)))

    return Summary(
        method=method,
        level=level,
        coverage=mean("coverage"),
        coverage_se=error("coverage"),
        width=mean("mean_width"),
        width_se=error("mean_width"),
        infinite_share=mean("infinite_share"),
        interval_score=mean("interval_score"),
    )
