"""fullcp: full conformal prediction intervals for trained neural-network regressors, without retraining.

>>> import fullcp
>>> fullcp.__version__ >= "0.1"
True
"""

from importlib.metadata import PackageNotFoundError, version

from fullcp.curvature import NotPositiveDefiniteError
from fullcp.predictors import (
    FullConformalRegressor,
    InfiniteIntervalWarning,
    LaplaceRegressor,
    NormalizedSplitConformalRegressor,
    NotFittedError,
    PredictionIntervals,
    RefinedSplitConformalRegressor,
    SplitConformalRegressor,
)

try:
    __version__ = version("fullcp")
except PackageNotFoundError:  # a source tree on PYTHONPATH
    __version__ = "0.1.0+source"

__all__ = [
    "FullConformalRegressor",
    "InfiniteIntervalWarning",
    "LaplaceRegressor",
    "NormalizedSplitConformalRegressor",
    "NotFittedError",
    "NotPositiveDefiniteError",
    "PredictionIntervals",
    "RefinedSplitConformalRegressor",
    "SplitConformalRegressor",
    "__version__",
]
