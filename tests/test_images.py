"""A convolutional network on images: every structure gives intervals, in every precision, on every device."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fullcp
from fullcp.curvature import STRUCTURES
from fullcp.training import train

CUDA = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")]
)


def images(rows, seed):
    """Bright squares on noise; the label is the height of the square."""
    generator = torch.Generator().manual_seed(seed)
    X = 0.3 * torch.randn(rows, 1, 12, 12, generator=generator)
    at = torch.randint(0, 9, (rows, 2), generator=generator)
    for image, (i, j) in zip(X, at.tolist()):
        image[0, i : i + 4, j : j + 4] += 1.0
    return X, at[:, 0].float() / 4 - 1 + 0.1 * torch.randn(rows, generator=generator)


@pytest.fixture(scope="module")
def trained():
    """In bfloat16 numbers, so that a network cast to bfloat16 is the same."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 6, 3, stride=2), nn.GELU(), nn.Conv2d(6, 8, 3), nn.GELU(), nn.Flatten(), nn.Linear(72, 1)
    )
    X, y = images(300, 1)
    train(model, X, y, l2=1.0, epochs=200)
    return model.bfloat16().float()


def fitted(model, curvature, device="cpu", dtype=torch.float32, **settings):
    model = copy.deepcopy(model).to(device, dtype)
    X, y = (t.to(device) for t in images(300, 1))
    return fullcp.FullConformalRegressor(model, curvature, l2=1.0, **settings).conformalize(X.to(dtype), y)


@pytest.mark.parametrize("curvature", STRUCTURES)
def test_every_structure_covers(trained, curvature):
    cp = fitted(trained, curvature)
    X, y = images(600, 2)
    result = cp.predict_interval(X, 0.9)
    inside = ((y.unsqueeze(1) >= result.lower) & (y.unsqueeze(1) <= result.upper)).double().mean()
    assert 0.8 < float(inside) < (1.0 if curvature == "diagonal" else 0.99)  # which takes leverages for far too large
    assert float((result.upper - result.lower).mean()) < 2.5  # the labels' own interval has width 2 and more


@pytest.mark.parametrize("curvature", STRUCTURES)
def test_half_precision_networks(trained, curvature):
    """The algebra is in float64 whatever the network's precision: intervals differ by the rounding of phi and f."""
    X, _ = images(50, 3)
    exact = fitted(trained, curvature).predict_interval(X, [0.8, 0.9]).intervals
    half = fitted(trained, curvature, dtype=torch.bfloat16).predict_interval(X.bfloat16(), [0.8, 0.9]).intervals
    assert half.dtype == torch.float64
    width = float((exact[:, 1] - exact[:, 0]).mean())
    assert float((half - exact).abs().mean()) < 0.1 * width


@pytest.mark.parametrize("curvature", STRUCTURES)
@pytest.mark.parametrize("device", [CUDA])
def test_a_gpu_gives_the_same(trained, curvature, device, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # ten bits in the products of convolutions
    X, _ = images(50, 3)
    for settings in ({}, {"refine": True}):
        here = fitted(trained, curvature, **settings).predict_interval(X, [0.8, 0.9]).intervals
        there = fitted(trained, curvature, device, **settings).predict_interval(X.to(device), [0.8, 0.9]).intervals
        assert there.device.type == device
        torch.testing.assert_close(there.cpu(), here, rtol=0, atol=1e-4)
