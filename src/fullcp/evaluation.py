"""How good are intervals: coverage, width, interval score, adaptivity, and the bands coverage should lie in.

Intervals have shape (n, 2) here; `evaluate` takes the (n, 2, levels[, outputs]) of `predict_interval` apart.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import floor
from typing import Any, SupportsFloat

import numpy as np
from numpy.typing import NDArray

from fullcp.inputs import check_positive_int, read_single_level

__all__ = [
    "Evaluation",
    "coverage",
    "coverage_band",
    "evaluate",
    "infinite_share",
    "interval_score",
    "joint_coverage",
    "size_stratified_coverage",
    "validity_band",
    "volume",
    "width_residual_correlation",
    "widths",
]
Array = NDArray[np.float64]


def coverage(y: Any, intervals: Any) -> float:
    """Share of labels y (n,) inside their intervals (n, 2), ends included.

    Examples
    --------
    >>> coverage([0.0, 3.0], [[-1.0, 0.0], [0.0, 2.0]])
    0.5
    """
    y, lower, upper = _take(y, intervals)
    return float(np.mean((lower <= y) & (y <= upper)))


def widths(intervals: Any) -> Array:
    """Upper end minus lower end, (n,).

    Examples
    --------
    >>> widths([[-1.0, 0.0], [0.0, 2.0]])
    array([1., 2.])
    """
    array = _array(intervals)
    if array.ndim != 2 or array.shape[1] != 2:
        raise ValueError(f"intervals must have shape (n, 2), got {array.shape}")
    return array[:, 1] - array[:, 0]


def infinite_share(intervals: Any) -> float:
    """Share of intervals with an infinite end."""
    return float(np.mean(~np.isfinite(widths(intervals))))


def interval_score(y: Any, intervals: Any, confidence_level: SupportsFloat) -> float:
    """Mean Winkler score: width plus 2 / alpha times the distance of labels outside. Lower is better.

    Examples
    --------
    >>> round(interval_score([0.0, 2.5], [[-1.0, 0.0], [0.0, 2.0]], 0.9), 6)  # 1, and 2 + 20 * 0.5
    6.5
    """
    y, lower, upper = _take(y, intervals)
    outside = np.maximum(lower - y, 0) + np.maximum(y - upper, 0)
    return float(np.mean(upper - lower + 2 / (1 - float(confidence_level)) * outside))


def width_residual_correlation(y: Any, prediction: Any, intervals: Any) -> float:
    """Spearman correlation of widths with absolute residuals: how well widths tell hard points from easy ones.

    nan where all widths are equal, as they are for plain split conformal prediction.
    """
    from scipy.stats import rankdata

    y, lower, upper = _take(y, intervals)
    width, size = upper - lower, np.abs(y - _array(prediction))
    if len(y) < 2 or _is_constant(width) or np.ptp(size) == 0:
        return float("nan")
    return float(np.corrcoef(rankdata(width), rankdata(size))[0, 1])


def size_stratified_coverage(y: Any, intervals: Any, bins: int = 4) -> Array:
    """Coverage within each of `bins` groups of equal size, from the narrowest intervals to the widest."""
    y, lower, upper = _take(y, intervals)
    if not 1 <= bins <= len(y):
        raise ValueError(f"bins must lie between 1 and the number of rows, {len(y)}, got {bins}")
    covered = (lower <= y) & (y <= upper)
    order = np.argsort(upper - lower, kind="stable")
    return np.array([covered[group].mean() for group in np.array_split(order, bins)])


def volume(intervals: Any) -> Array:
    """Volumes of the rectangles (n, 2, O): the product of the widths."""
    array = _array(intervals)
    if array.ndim != 3 or array.shape[1] != 2:
        raise ValueError(f"intervals must have shape (n, 2, outputs), got {array.shape}")
    return (array[:, 1] - array[:, 0]).prod(1)


def joint_coverage(y: Any, intervals: Any) -> float:
    """Share of label vectors y (n, O) with every entry inside its interval (n, 2, O).

    Examples
    --------
    >>> joint_coverage([[0.0, 3.0]], [[[-1.0, 0.0], [1.0, 2.0]]])
    0.0
    """
    array, labels = _array(intervals), _labels(y)
    if labels.shape != (array.shape[0], array.shape[2]):
        raise ValueError(f"y must have shape {(array.shape[0], array.shape[2])}, got {labels.shape}")
    return float(np.mean(((array[:, 0] <= labels) & (labels <= array[:, 1])).all(1)))


def validity_band(
    rows: int, confidence_level: SupportsFloat, quantiles: tuple[float, float] = (0.01, 0.99)
) -> tuple[float, float]:
    """The paper's band for mean coverage: quantiles of Beta(n + 1 - l, l), l = floor((n + 1) alpha).

    This is the law of split-CP coverage given the calibration rows, for endlessly many test points.

    Parameters
    ----------
    rows : int
        Number of points that calibrate.

    Examples
    --------
    >>> low, high = validity_band(277, 0.9)
    >>> round(low, 3), round(high, 3)
    (0.858, 0.94)
    """
    from scipy.stats import beta

    a, b = _beta_parameters(rows, confidence_level)
    return (1.0, 1.0) if b == 0 else (float(beta.ppf(quantiles[0], a, b)), float(beta.ppf(quantiles[1], a, b)))


def coverage_band(
    rows: int,
    test_rows: int,
    confidence_level: SupportsFloat,
    quantiles: tuple[float, float] = (0.01, 0.99),
    repeats: int = 1,
) -> tuple[float, float]:
    """The exact band for coverage measured on `test_rows` points: beta-binomial, averaged over independent repeats.

    Coverage on one test set is beta-binomial with the parameters of `validity_band`. The mean over `repeats`
    independent data sets has the convolution of that law with itself, which is computed, not approximated.

    Returns
    -------
    low, high : quantiles of the measured mean coverage

    Examples
    --------
    >>> low, high = coverage_band(277, 500, 0.9)
    >>> round(low, 3), round(high, 3)
    (0.846, 0.948)
    """
    from scipy.stats import betabinom

    a, b = _beta_parameters(rows, confidence_level)
    if b == 0:
        return 1.0, 1.0
    single = betabinom.pmf(np.arange(test_rows + 1), test_rows, a, b)
    total = np.clip(_power_of_law(single, repeats), 0, None).cumsum()
    top = test_rows * repeats
    low, high = (int(np.searchsorted(total, q * total[-1])) for q in quantiles)
    return low / top, min(high, top) / top


@dataclass(frozen=True)
class Evaluation:
    """One row of a table: how intervals of one level did on a test set (of one output)."""

    level: float
    output: int
    coverage: float
    mean_width: float
    median_width: float
    infinite_share: float
    interval_score: float
    width_residual_correlation: float
    worst_stratum_coverage: float

    def as_dict(self) -> dict[str, float]:
        """The row as a dictionary."""
        return asdict(self)


def evaluate(y: Any, result: Any, confidence_level: Any = None, *, bins: int = 4) -> list[Evaluation]:
    """All measures for each level (and output) of a result of `predict_interval`.

    Parameters
    ----------
    y : (n,) or (n, O)
    result : PredictionIntervals, or a pair (prediction, intervals)
    confidence_level : the level or levels of the intervals; left out, the result's own
    bins : number of groups for size-stratified coverage, at most the number of rows

    Examples
    --------
    >>> import numpy as np
    >>> intervals = np.array([[[-1.0], [1.0]], [[-2.0], [2.0]]])
    >>> row = evaluate([0.0, 3.0], (np.zeros(2), intervals), 0.9)[0]
    >>> row.coverage, row.mean_width
    (0.5, 3.0)
    """
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(f"result must be a pair (prediction, intervals), got {type(result).__name__}")
    if confidence_level is None:
        confidence_level = getattr(result, "levels", None)
        if not confidence_level:
            raise TypeError("confidence_level is missing: the result does not know its own")
    prediction, intervals = (_array(part) for part in result)
    labels = _labels(y)
    levels = [float(level) for level in np.atleast_1d(np.asarray(confidence_level, dtype=np.float64))]
    if intervals.ndim == 3:
        intervals, prediction, labels = intervals[..., None], prediction.reshape(-1, 1), labels.reshape(-1, 1)
    if intervals.shape[2] != len(levels):
        raise ValueError(f"confidence_level has {len(levels)} level(s), the intervals have {intervals.shape[2]}")
    if labels.shape != prediction.shape or len(labels) != len(intervals):
        raise ValueError(f"y must have the shape of the predictions, {prediction.shape}, got {labels.shape}")
    return [
        _evaluate_one(labels[:, o], prediction[:, o], intervals[:, :, j, o], level, o, bins)
        for j, level in enumerate(levels)
        for o in range(labels.shape[1])
    ]


def _evaluate_one(y: Array, prediction: Array, intervals: Array, level: float, output: int, bins: int) -> Evaluation:
    width = widths(intervals)
    return Evaluation(
        level=level,
        output=output,
        coverage=coverage(y, intervals),
        mean_width=float(width.mean()),
        median_width=float(np.median(width)),
        infinite_share=infinite_share(intervals),
        interval_score=interval_score(y, intervals, level),
        width_residual_correlation=width_residual_correlation(y, prediction, intervals),
        worst_stratum_coverage=float(size_stratified_coverage(y, intervals, min(bins, len(y))).min()),
    )


def _beta_parameters(rows: int, confidence_level: SupportsFloat) -> tuple[int, int]:
    level = read_single_level(confidence_level)
    check_positive_int("rows", rows)
    above = floor((rows + 1) * (1 - level))
    return rows + 1 - above, above


def _power_of_law(law: Array, times: int) -> Array:
    """The law of the sum of `times` independent draws: a power of its Fourier transform."""
    length = (len(law) - 1) * times + 1
    return np.fft.irfft(np.fft.rfft(law, length) ** times, length) if length > 1 else np.ones(1)


def _is_constant(width: Array) -> bool:
    finite = width[np.isfinite(width)]
    return len(finite) < len(width) or bool(np.ptp(finite) <= 1e-12 * np.abs(finite).max(initial=0.0))


def _array(values: Any) -> Array:
    if hasattr(values, "detach"):
        values = values.detach().cpu().numpy()
    return np.asarray(values, dtype=np.float64)


def _labels(y: Any) -> Array:
    labels = _array(y)
    if not np.isfinite(labels).all():
        raise ValueError("y contains NaN or infinite values")
    return labels


def _take(y: Any, intervals: Any) -> tuple[Array, Array, Array]:
    labels, array = _labels(y).reshape(-1), _array(intervals)
    if array.ndim != 2 or array.shape[1] != 2 or len(array) != len(labels):
        raise ValueError(f"intervals must have shape ({len(labels)}, 2), got {array.shape}")
    return labels, array[:, 0], array[:, 1]
