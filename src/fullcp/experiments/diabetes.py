"""The demo: width and coverage of five methods on the diabetes data, over a few random splits."""

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
    LaplaceRegressor,
    NormalizedSplitConformalRegressor,
    PredictionIntervals,
    Predictor,
    RefinedSplitConformalRegressor,
    SplitConformalRegressor,
)
from fullcp.progress import track
from fullcp.training import mlp, train

Array = NDArray[np.float64]
LEVELS = (0.9, 0.95, 0.99)
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


def run(splits: int = 10, *, epochs: int = 300, seed: int = 0) -> list[Summary]:
    """Train on each split, conformalize by each method, evaluate on its test rows."""
    X, y = load_diabetes()
    found: dict[str, list[list[Evaluation]]] = {}
    parts = list(random_splits(len(X), splits, seed=seed))
    for i, (train_rows, test_rows) in enumerate(track(parts, "splits", len(parts))):
        for name, result in _one_split(X, y, train_rows, test_rows, epochs, seed + i):
            found.setdefault(name, []).append(evaluate(y[test_rows], result, LEVELS))
    return [
        _summarise(name, level, [run[j] for run in runs])
        for name, runs in found.items()
        for j, level in enumerate(LEVELS)
    ]


def _one_split(
    X: Array, y: Array, train_rows: NDArray[np.int64], test_rows: NDArray[np.int64], epochs: int, seed: int
) -> Iterator[tuple[str, PredictionIntervals]]:
    """Each method's intervals on the test rows, in the target's units."""
    x_scale, y_scale = Standardizer.of(X[train_rows]), Standardizer.of(y[train_rows])
    X, y = x_scale.transform(X), y_scale.transform(y)
    fit_rows, cal_rows = halves(train_rows)
    full, half = (_trained(X[rows], y[rows], epochs, seed) for rows in (train_rows, fit_rows))
    everything, fit, cal = ((X[rows], y[rows]) for rows in (train_rows, fit_rows, cal_rows))
    makers: dict[str, Callable[[], Predictor]] = {
        "ACP-GN": lambda: FullConformalRegressor(full, l2=L2).conformalize(*everything),
        "SCP-GN": lambda: NormalizedSplitConformalRegressor(half, l2=L2).fit(*fit).conformalize(*cal),
        "SCP": lambda: SplitConformalRegressor(half).conformalize(*cal),
        "split + refine": lambda: RefinedSplitConformalRegressor(half, l2=L2).conformalize(*cal),
        "LA": lambda: LaplaceRegressor(full, l2=L2).fit(*everything),
    }
    for name, make in makers.items():
        prediction, intervals = make().predict_interval(X[test_rows], LEVELS)
        yield name, PredictionIntervals(y_scale.inverse(prediction), y_scale.inverse(intervals))


def _trained(X: Array, y: Array, epochs: int, seed: int) -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = mlp(X.shape[1])
    train(model, X, y, l2=L2, epochs=epochs, seed=seed)
    return model


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
