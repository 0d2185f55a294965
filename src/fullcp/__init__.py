"""fullcp: full conformal prediction intervals for trained neural-network regressors, without retraining.

>>> import fullcp
>>> fullcp.__version__ >= "0.1"
True
"""

from typing import TYPE_CHECKING, Any

from fullcp import evaluation, training, tuning
from fullcp.calibration import calibration_share
from fullcp.curvature import LowRankWarning, NotPositiveDefiniteError, RefinementWarning
from fullcp.predictors import (
    CandidateGridWarning,
    ConformalizedQuantileRegressor,
    CVPlusRegressor,
    FarFromMinimumWarning,
    FullConformalRegressor,
    GridFullConformalRegressor,
    InfiniteIntervalWarning,
    InformedSplitConformalRegressor,
    JackknifePlusRegressor,
    LaplaceRegressor,
    MissingScoreWarning,
    NormalizedSplitConformalRegressor,
    NotFittedError,
    PoorFitWarning,
    PredictionIntervals,
    RefinedSplitConformalRegressor,
    ResidualConformalRegressor,
    RetrainedFullConformalRegressor,
    SeenRowsWarning,
    SplitConformalRegressor,
)
from fullcp.version import __version__

__all__ = [
    "CVPlusRegressor",
    "CandidateGridWarning",
    "ConformalizedQuantileRegressor",
    "FarFromMinimumWarning",
    "FullConformalRegressor",
    "GridFullConformalRegressor",
    "InfiniteIntervalWarning",
    "InformedSplitConformalRegressor",
    "JackknifePlusRegressor",
    "LaplaceRegressor",
    "LowRankWarning",
    "MissingScoreWarning",
    "NormalizedSplitConformalRegressor",
    "NotFittedError",
    "NotPositiveDefiniteError",
    "PoorFitWarning",
    "PredictionIntervals",
    "RefinedSplitConformalRegressor",
    "RefinementWarning",
    "ResidualConformalRegressor",
    "RetrainedFullConformalRegressor",
    "SeenRowsWarning",
    "SplitConformalRegressor",
    "__version__",
    "calibration_share",
    "evaluation",
    "training",
    "tuning",
]

if TYPE_CHECKING:
    from fullcp import data as data
    from fullcp import sklearn as sklearn
    from fullcp import vision as vision
else:

    def __getattr__(name: str) -> Any:
        """Import these at their first use: scikit-learn takes time to load, and not everybody has it."""
        if name in ("data", "sklearn", "vision"):
            from importlib import import_module

            return import_module(f"fullcp.{name}")
        raise AttributeError(f"module 'fullcp' has no attribute {name!r}")
