"""The predictors that the contract runs over, their network and their data."""

from __future__ import annotations

import torch
from torch import nn

import fullcp
from fullcp.predictors import CandidatePredictor


def network(outputs=1, seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, outputs)).to(dtype)


def data(outputs=1, rows=70, seed=1, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(rows, 4, generator=generator)
    y = X[:, :1] * torch.arange(1, outputs + 1) + torch.randn(rows, outputs, generator=generator)
    return X.to(dtype), (y[:, 0] if outputs == 1 else y).to(dtype)


def fit_both(cp, X, y):
    """A method that is given training and calibration rows."""
    return cp.fit(X[:45], y[:45]).conformalize(X[45:], y[45:])


# A predictor is tested by adding a line: name -> (class, arguments, how it is given data).
PREDICTORS = {
    "full": (fullcp.FullConformalRegressor, {}, lambda cp, X, y: cp.conformalize(X, y)),
    "full, signed, deleted": (
        fullcp.FullConformalRegressor,
        {"residuals": "signed", "score": "deleted", "refine": True, "l2": [1.0, 2.0, 3.0, 4.0]},
        lambda cp, X, y: cp.conformalize(X, y),
    ),
    "full, dual": (
        fullcp.FullConformalRegressor,
        {"residuals": "signed", "score": "standard"},
        lambda cp, X, y: cp.conformalize(X[:25], y[:25]),
    ),
    "grid full": (fullcp.GridFullConformalRegressor, {}, lambda cp, X, y: cp.conformalize(X, y)),
    "grid full, dual, signed": (
        fullcp.GridFullConformalRegressor,
        {"residuals": "signed", "candidates": 60},
        lambda cp, X, y: cp.conformalize(X[:25], y[:25]),
    ),
    "retrained full": (
        fullcp.RetrainedFullConformalRegressor,
        {"candidates": 12, "epochs": 4, "l2": 1.0, "learning_rate": (0.1, 0.01)},
        lambda cp, X, y: cp.conformalize(X[:30], y[:30]),
    ),
    "full, kfac": (
        fullcp.FullConformalRegressor,
        {"curvature": "kfac", "score": "standard", "l2": [1.0, 2.0, 3.0, 4.0]},
        lambda cp, X, y: cp.conformalize(X, y),
    ),
    "full, last layer": (
        fullcp.FullConformalRegressor,
        {"curvature": "last_layer", "refine": True},
        lambda cp, X, y: cp.conformalize(X, y),
    ),
    "full, diagonal, studentized": (
        fullcp.FullConformalRegressor,
        {"curvature": "diagonal", "score": "studentized", "l2": 30.0},
        lambda cp, X, y: cp.conformalize(X, y),
    ),
    "full, low rank": (
        fullcp.FullConformalRegressor,
        {"curvature": "low_rank"},
        lambda cp, X, y: cp.conformalize(X, y),
    ),
    "refined split, low rank": (
        fullcp.RefinedSplitConformalRegressor,
        {"curvature": "low_rank:9", "score": "standard", "l2": [1.0, 2.0, 3.0, 4.0]},
        lambda cp, X, y: cp.conformalize(X, y),
    ),
    "normalized split, low rank": (fullcp.NormalizedSplitConformalRegressor, {"curvature": "low_rank:12"}, fit_both),
    "grid full, kfac": (
        fullcp.GridFullConformalRegressor,
        {"curvature": "kfac"},
        lambda cp, X, y: cp.conformalize(X, y),
    ),
    "grid full, indirect": (
        fullcp.GridFullConformalRegressor,
        {"approach": "indirect"},
        lambda cp, X, y: cp.conformalize(X, y),
    ),
    "grid full, indirect, dual, signed": (
        fullcp.GridFullConformalRegressor,
        {"approach": "indirect", "residuals": "signed", "candidates": 60},
        lambda cp, X, y: cp.conformalize(X[:25], y[:25]),
    ),
    "refined split": (fullcp.RefinedSplitConformalRegressor, {"l2": 0.5}, lambda cp, X, y: cp.conformalize(X, y)),
    "informed split": (fullcp.InformedSplitConformalRegressor, {}, fit_both),
    "informed split, dual, signed": (
        fullcp.InformedSplitConformalRegressor,
        {"residuals": "signed", "l2": [1.0, 2.0, 3.0, 4.0]},
        lambda cp, X, y: cp.fit(X[:9], y[:9]).conformalize(X[35:], y[35:]),
    ),
    "informed split, kfac": (fullcp.InformedSplitConformalRegressor, {"curvature": "kfac"}, fit_both),
    "informed split, last layer, deleted": (
        fullcp.InformedSplitConformalRegressor,
        {"curvature": "last_layer", "score": "deleted", "l2": 0.5},
        fit_both,
    ),
    "normalized split": (fullcp.NormalizedSplitConformalRegressor, {}, fit_both),
    "normalized split, dual, signed": (
        fullcp.NormalizedSplitConformalRegressor,
        {"residuals": "signed"},
        lambda cp, X, y: cp.fit(X[:20], y[:20]).conformalize(X[20:], y[20:]),
    ),
    "refined split, kfac": (
        fullcp.RefinedSplitConformalRegressor,
        {"curvature": "kfac", "score": "standard", "l2": 0.5},
        lambda cp, X, y: cp.conformalize(X, y),
    ),
    "normalized split, kfac": (fullcp.NormalizedSplitConformalRegressor, {"curvature": "kfac"}, fit_both),
    "normalized split, last layer, dual": (
        fullcp.NormalizedSplitConformalRegressor,
        {"curvature": "last_layer", "l2": 0.5},
        lambda cp, X, y: cp.fit(X[:6], y[:6]).conformalize(X[6:], y[6:]),
    ),
    "laplace, diagonal": (fullcp.LaplaceRegressor, {"curvature": "diagonal"}, lambda cp, X, y: cp.fit(X, y)),
    "jackknife+": (fullcp.JackknifePlusRegressor, {}, lambda cp, X, y: cp.conformalize(X, y)),
    "jackknife+, plain, dual": (
        fullcp.JackknifePlusRegressor,
        {"normalized": False, "refine": True, "l2": [1.0, 2.0, 3.0, 4.0]},
        lambda cp, X, y: cp.conformalize(X[:25], y[:25]),
    ),
    "cv+": (fullcp.CVPlusRegressor, {"folds": 3, "epochs": 4}, lambda cp, X, y: cp.conformalize(X, y)),
    "cv+, plain": (
        fullcp.CVPlusRegressor,
        {"folds": 2, "normalized": False, "epochs": 4},
        lambda cp, X, y: cp.conformalize(X, y),
    ),
    "residual fit": (fullcp.ResidualConformalRegressor, {"epochs": 8}, fit_both),
    "residual fit, signed": (
        fullcp.ResidualConformalRegressor,
        {"residuals": "signed", "beta": 0.1, "epochs": 4, "learning_rate": (0.05, 0.05)},
        fit_both,
    ),
    "quantile": (fullcp.ConformalizedQuantileRegressor, {"confidence_level": [0.9, 0.5, 0.8], "epochs": 8}, fit_both),
    "split": (fullcp.SplitConformalRegressor, {}, lambda cp, X, y: cp.conformalize(X, y)),
    "split, signed": (fullcp.SplitConformalRegressor, {"residuals": "signed"}, lambda cp, X, y: cp.conformalize(X, y)),
    "laplace": (fullcp.LaplaceRegressor, {"noise": 0.8}, lambda cp, X, y: cp.fit(X, y)),
}
# Methods that try labels one by one take one output, and their sets end at candidates.
ON_A_GRID = {name for name, (kind, _, _) in PREDICTORS.items() if issubclass(kind, CandidatePredictor)}
# Quantile regression takes one output, too, and trains a network of its own with two outputs a level.
QUANTILES = {name for name, (kind, _, _) in PREDICTORS.items() if kind is fullcp.ConformalizedQuantileRegressor}
ONE_OUTPUT = ON_A_GRID | QUANTILES
LEVELS = [0.5, 0.9, 0.8]


def network_for(name, outputs=1, seed=0, dtype=torch.float32):
    """The network that a predictor is given."""
    return network(2 * len(LEVELS) if name in QUANTILES else outputs, seed, dtype)


def predicting(cp):
    """The network that predictions come from."""
    return getattr(cp, "quantile_model_", cp.model)


def build(name, outputs=1, dtype=torch.float32, fit=True, **changes):
    kind, arguments, give = PREDICTORS[name]
    cp = kind(network_for(name, outputs, dtype=dtype), **{**arguments, **changes})
    return give(cp, *data(outputs, dtype=dtype)) if fit else cp
