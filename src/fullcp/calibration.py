"""How many rows to calibrate on: enough for the levels asked for, and the rest for training."""

from __future__ import annotations

from fractions import Fraction

from fullcp.influence import RESIDUALS
from fullcp.inputs import check_choice, check_positive_int, read_levels
from fullcp.notices import warn
from fullcp.regions import rows_needed

_EXCESS = Fraction(1, 2)  # by which the share of labels missed may exceed 1 - level, relative to it,
_SURELY = 0.95  # with this probability over calibration rows, at the most


def calibration_share(n: int, confidence_level: object = 0.9, *, residuals: str = "absolute") -> float:
    """The share of n rows that should calibrate, for a guaranteed method asked for these levels.

    Given N calibration rows, the coverage of all test points to come is random, with a Beta((1 - alpha)(N + 1),
    alpha (N + 1)) law where no rank is rounded (exact for split methods, close for the informed split, whose coverage
    on average is exact). The share proposed has the fewest rows for which, at each level 1 - alpha, intervals are
    finite and no more than 1.5 alpha of the labels are missed with probability 95 %: 112
    rows for 90 %, 240 for 95 %, 1,263 for 99 %. It is one half at the most, and a warning says so where half of the
    rows are too few for finite intervals.

    The proposal keeps coverage near its level for the one set of calibration rows that you have. On average over such
    sets coverage is the level whatever the share, and with few rows in all a smaller share often has the narrower
    intervals, since more rows are left to train on.

    Parameters
    ----------
    n : rows there are, for training and calibration.
    confidence_level : float or sequence of floats in (0, 1)
    residuals : "absolute" or "signed"

    Returns
    -------
    float
        In (0, 1/2]: round(n * share) rows are to calibrate.

    Examples
    --------
    >>> import fullcp
    >>> round(506 * fullcp.calibration_share(506, 0.9))
    112
    >>> fullcp.calibration_share(506, [0.9, 0.99])
    0.5
    """
    n = check_positive_int("n", n, least=4)
    check_choice("residuals", residuals, RESIDUALS)
    levels = read_levels(confidence_level)
    for level in levels:
        if n // 2 < rows_needed(level, residuals):
            warn(
                f"n = {n} rows are too few for confidence_level {float(level):.6g}: half of them, {n // 2}, would "
                f"calibrate, and finite intervals need {rows_needed(level, residuals)}",
                UserWarning,
            )
    return max(_rows_for(level, residuals, n // 2) for level in levels) / n


def _rows_for(level: Fraction, residuals: str, most: int) -> int:
    """The fewest rows that serve a level, or `most`."""
    from scipy.stats import beta

    miss, alpha = float((1 + _EXCESS) * (1 - level)), float(1 - level)

    def enough(N: int) -> bool:
        return miss >= 1 or beta.cdf(miss, alpha * (N + 1), (1 - alpha) * (N + 1)) >= _SURELY

    low, high = min(max(2, rows_needed(level, residuals)), most), most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle + 1, high)
    return low
