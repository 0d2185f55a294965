"""The diabetes data that come with scikit-learn: 442 patients, 10 inputs, disease progression after a year."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def load_diabetes() -> tuple[Array, Array]:
    """Inputs (442, 10) and targets (442,), unscaled; needs scikit-learn, no download."""
    from sklearn.datasets import load_diabetes as load

    X, y = load(return_X_y=True, scaled=False)
    return np.asarray(X, dtype=np.float64), np.asarray(y, dtype=np.float64)
