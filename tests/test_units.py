"""Labels in other units than the network's are noticed, and warnings point at the caller's line."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import fullcp

torch.manual_seed(0)
X = torch.randn(80, 3)
Y = X.sum(1) + 0.1 * torch.randn(80)


def perfect():
    model = nn.Linear(3, 1)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.zero_()
    return model


CONFORMALIZED = [
    lambda m: fullcp.FullConformalRegressor(m, l2=1.0).conformalize,
    lambda m: fullcp.RefinedSplitConformalRegressor(m, l2=1.0).conformalize,
    lambda m: fullcp.JackknifePlusRegressor(m, l2=1.0).conformalize,
    lambda m: fullcp.SplitConformalRegressor(m).conformalize,
    lambda m: fullcp.LaplaceRegressor(m, l2=1.0).fit,
    lambda m: fullcp.NormalizedSplitConformalRegressor(m, l2=1.0).fit,
    lambda m: fullcp.InformedSplitConformalRegressor(m, l2=1.0).fit,
]


@pytest.mark.parametrize("which", range(len(CONFORMALIZED)))
def test_labels_in_other_units(which):
    step = CONFORMALIZED[which]
    with pytest.warns(fullcp.PoorFitWarning, match=r"worse than the mean of y does \(R\^2 = -\d") as caught:
        step(perfect())(X, 40 * Y + 152)
    (poor,) = [w for w in caught if w.category is fullcp.PoorFitWarning]
    assert poor.filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error", fullcp.PoorFitWarning)
        step(perfect())(X, Y)


def test_one_output_of_several_is_enough():
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.zero_()
    with pytest.warns(fullcp.PoorFitWarning):
        fullcp.SplitConformalRegressor(model).conformalize(X, torch.stack([Y, -Y], 1))


def test_too_few_rows_to_say():
    with warnings.catch_warnings():
        warnings.simplefilter("error", fullcp.PoorFitWarning)
        fullcp.SplitConformalRegressor(perfect()).conformalize(X[:9], Y[:9] + 1e3)
