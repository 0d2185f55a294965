"""How many rows to calibrate on, against the law of the coverage."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import beta

import fullcp
from fullcp.inputs import read_levels
from fullcp.regions import rows_needed


@pytest.mark.parametrize("residuals", ["absolute", "signed"])
@pytest.mark.parametrize("level", [0.5, 0.8, 0.9, 0.95, 0.99])
def test_the_fewest_rows_that_miss_little(level, residuals):
    """As many as promised keep within 1.5 alpha, and one fewer does not (or has no finite interval)."""
    N = round(10**6 * fullcp.calibration_share(10**6, level, residuals=residuals))
    alpha = 1 - level
    rng = np.random.default_rng(0)

    def within(rows):
        """The share of calibration sets whose rank alpha (rows + 1) order statistic misses little, by simulation."""
        missed = rng.beta(alpha * (rows + 1), (1 - alpha) * (rows + 1), size=400_000)
        return (missed <= 1.5 * alpha).mean()

    least = rows_needed(read_levels(level)[0], residuals)
    assert least <= N
    assert within(N) > 0.95 - 0.002
    if least < N:
        assert beta.cdf(1.5 * alpha, alpha * N, (1 - alpha) * N) < 0.95


def test_the_highest_level_decides_and_half_is_the_most():
    share = fullcp.calibration_share
    assert share(5000, [0.8, 0.95, 0.9]) == share(5000, 0.95) > share(5000, 0.9)
    assert share(100, 0.95) == 0.5
    with pytest.warns(
        UserWarning, match="n = 7 rows are too few for confidence_level 0.99: half of them, 3, .* need 99"
    ):
        assert share(7, 0.99) == 3 / 7
    assert [round(n * share(n, 0.9)) for n in (1000, 10_000, 10**6)] == [112, 112, 112]


def test_bad_input():
    with pytest.raises(ValueError, match="n must be"):
        fullcp.calibration_share(3)
    with pytest.raises(ValueError, match="residuals must be"):
        fullcp.calibration_share(100, residuals="auto")
    with pytest.raises(ValueError, match="confidence_level"):
        fullcp.calibration_share(100, 1.0)
