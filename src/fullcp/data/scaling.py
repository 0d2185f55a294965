"""Standardisation by the training part, as the paper's protocol has it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Standardizer:
    """Mean and standard deviation (ddof 0) of each column; constant columns are only centred.

    Examples
    --------
    >>> scaler = Standardizer.of([[0.0, 5.0], [2.0, 5.0]])
    >>> scaler.transform([[4.0, 5.0]]).tolist()
    [[3.0, 0.0]]
    """

    mean: Array
    scale: Array

    @classmethod
    def of(cls, values: Any) -> Standardizer:
        """The statistics of an array (N,) or (N, columns)."""
        array = np.asarray(values, dtype=np.float64)
        mean, scale = array.mean(axis=0), array.std(axis=0)
        return cls(mean, np.where(scale > 1e-12 * np.abs(mean), scale, 1.0))  # a constant's deviation is rounding

    def transform(self, values: Any) -> Array:
        """Into units of standard deviations."""
        return (np.asarray(values, dtype=np.float64) - self.mean) / self.scale

    def inverse(self, values: Any) -> Array:
        """Back into the original units."""
        return np.asarray(values, dtype=np.float64) * self.scale + self.mean
