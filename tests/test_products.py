"""Products with phi that hold no gradients of rows, and the ridge solution found by them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fullcp
from cases import NETWORKS, build
from fullcp.curvature import fit_curvature
from fullcp.features import FeatureRows, Jacobian, gram_product, products
from fullcp.refinement import relative_shift
from reference import dense_jacobian
from test_kfac import chain, rows_of


@pytest.mark.parametrize("name", NETWORKS)
def test_products_without_phi(name):
    model, X = build(name)
    model.eval()
    features = FeatureRows(Jacobian(model, X), X, memory=10**8)
    product = gram_product(features)
    flat = dense_jacobian(model, X)[1].flatten(0, 1)
    v = torch.randn(features.size, dtype=torch.float64)
    torch.testing.assert_close(product(v), flat.T @ (flat @ v), rtol=1e-9, atol=1e-9)
    assert product.__name__ == "without_phi"


def test_products_of_networks_without_forward_derivatives():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, g):
            return 2 * ctx.saved_tensors[0] * g

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def forward(self, x):
            return Square.apply(self.layer(x))

    model, X = Network().double(), torch.randn(9, 3, dtype=torch.float64)
    product = gram_product(rows_of(model, X))
    flat = dense_jacobian(model, X)[1].flatten(0, 1)
    v = torch.randn(4, dtype=torch.float64)
    assert product.__name__ == "from_phi"
    torch.testing.assert_close(product(v), flat.T @ (flat @ v))


def test_a_refinement_cut_short_is_told(monkeypatch):
    monkeypatch.setattr("fullcp.curvature.ridge._MOST_STEPS", 1)
    model, X = chain("one output")
    features = rows_of(model, X)
    curvature = fit_curvature(features, "kfac", 0.1)
    with pytest.warns(fullcp.RefinementWarning, match="1e-06 was wanted: raise l2"):
        curvature.refine(torch.randn(9, 1).double(), torch.ones(features.size).double())


def test_an_unasked_step_takes_few_products_and_no_phi(monkeypatch):
    """Its size is within a fifth of the exact one's, for the price of six passes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1))
    X = torch.randn(300, 3)
    features, e = rows_of(model, X), torch.sin(3 * X[:, :1]).double()
    curvature = fit_curvature(features, "kfac", 0.5)
    theta = torch.cat([p.detach().flatten().double() for p in model.parameters()])
    exact = relative_shift(e, curvature.refine(e, theta)[1])
    passes, one_pass, gradients = [], products._residual_product, Jacobian.__call__

    def counted(jacobian, x, *rest):
        passes.append(len(x))
        return one_pass(jacobian, x, *rest)

    def of_few(jacobian, x):
        assert len(x) <= 4, "phi was formed"
        return gradients(jacobian, x)

    monkeypatch.setattr(products, "_residual_product", counted)
    monkeypatch.setattr(Jacobian, "__call__", of_few)
    assert relative_shift(e, curvature.refine(e, theta, exactly=False)[1]) == pytest.approx(exact, rel=0.2)
    assert passes.count(300) == 6


def test_products_take_their_share_of_a_small_budget():
    """Chunks of a quarter of it, by what rows take in float64: few enough for the milliseconds that each costs."""
    model = nn.Sequential(nn.Linear(800, 10), nn.GELU(), nn.Linear(10, 1))
    X = torch.randn(2000, 800)
    usual = products._rows_per_pass(rows_of(model, X, memory=20 * 10**6))
    assert 150 < usual < 20e6 / 4 / (8 * 800)
    for dtype in (torch.float64, torch.bfloat16):  # all pass in float64
        size = products._rows_per_pass(rows_of(model.to(dtype), X.to(dtype), memory=20 * 10**6))
        assert size == pytest.approx(usual, rel=0.1)
