"""The public classes, one file a method."""

from fullcp.predictors.base import InfiniteIntervalWarning, NotFittedError, Predictor
from fullcp.predictors.candidate import CandidateGridWarning, CandidatePredictor
from fullcp.predictors.cv_plus import CVPlusRegressor
from fullcp.predictors.full import FarFromMinimumWarning, FullConformalRegressor, MissingScoreWarning
from fullcp.predictors.grid_full import GridFullConformalRegressor
from fullcp.predictors.informed_split import InformedSplitConformalRegressor
from fullcp.predictors.jackknife import JackknifePlusRegressor
from fullcp.predictors.laplace import LaplaceRegressor
from fullcp.predictors.normalized_split import NormalizedSplitConformalRegressor
from fullcp.predictors.quantile import ConformalizedQuantileRegressor
from fullcp.predictors.refined_split import RefinedSplitConformalRegressor
from fullcp.predictors.residual_fit import ResidualConformalRegressor
from fullcp.predictors.result import PredictionIntervals
from fullcp.predictors.retrained_full import RetrainedFullConformalRegressor
from fullcp.predictors.seen import SeenRowsWarning
from fullcp.predictors.split import SplitConformalRegressor
from fullcp.predictors.units import PoorFitWarning

__all__ = [
    "CVPlusRegressor",
    "CandidateGridWarning",
    "CandidatePredictor",
    "ConformalizedQuantileRegressor",
    "FarFromMinimumWarning",
    "FullConformalRegressor",
    "GridFullConformalRegressor",
    "InfiniteIntervalWarning",
    "InformedSplitConformalRegressor",
    "JackknifePlusRegressor",
    "LaplaceRegressor",
    "MissingScoreWarning",
    "NormalizedSplitConformalRegressor",
    "NotFittedError",
    "PoorFitWarning",
    "PredictionIntervals",
    "Predictor",
    "RefinedSplitConformalRegressor",
    "ResidualConformalRegressor",
    "RetrainedFullConformalRegressor",
    "SeenRowsWarning",
    "SplitConformalRegressor",
]
