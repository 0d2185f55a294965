"""Losses and criteria: of the library and of users, tried before any training."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fullcp.training import PinballLoss, grid_search, mlp, replicate, train, train_ensemble
from test_ensemble import F64, data, flat


def test_pinball_loss_is_its_definition_and_its_gradient_autograds():
    torch.manual_seed(0)
    loss = PinballLoss([0.05, 0.5, 0.95])
    f = torch.randn(4, 7, 3, dtype=F64, requires_grad=True)
    y = torch.randn(4, 7, 1, dtype=F64)
    tau = torch.tensor([0.05, 0.5, 0.95], dtype=F64)
    expected = torch.maximum(tau * (y - f), (tau - 1) * (y - f)).mean(2)
    values, g = loss.gradient(f, y)
    torch.testing.assert_close(values, expected)
    torch.testing.assert_close(g, torch.autograd.grad(expected.sum(), f)[0])


def test_a_loss_of_ones_own():
    X, y = data(60)
    pinball = PinballLoss([0.25, 0.75])
    ends = []
    for loss in (pinball, lambda f, y: pinball(f, y)):
        model = replicate(lambda: mlp(3, (8,), 2).double(), [0])[0]
        run = train(model, X, y, loss=loss, epochs=100, l2=1e-3)
        assert run.losses[-1] < run.losses[0]
        ends.append(flat(model))
    torch.testing.assert_close(*ends)


class Gradient:
    """A loss with a gradient of its own, right or wrong."""

    def __init__(self, values, gradient):
        self.values, self.of_outputs = values, gradient

    def __call__(self, f, y):
        return self.values(f, y)

    def gradient(self, f, y):
        return self.values(f, y), self.of_outputs(f, y)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    ("loss", "error", "words"),
    [
        (lambda f, y: (f - y) ** 2, ValueError, r"shape \(2, 3, {O}\) .* wanted is \(2, 3\), one number a row"),
        (nn.MSELoss(), ValueError, r"shape \(\) .* use reduction='none' and sum over the last dimension"),
        (nn.SmoothL1Loss(reduction="none"), ValueError, r"shape \(2, 3, {O}\)"),
        (lambda f, y: ((f - y) ** 2).sum((0, 2)), ValueError, r"shape \(3,\)"),
        (lambda f, y: 1.0, TypeError, "must return a tensor"),
        (lambda f, y: (f - y).detach().sum(-1), ValueError, "cannot be computed .* does not require grad"),
        (lambda f, y: (f - y[..., [1, 2, 3]]).sum(-1), ValueError, "cannot be computed"),
        (Gradient(lambda f, y: (f - y) ** 2, lambda f, y: 2 * (f - y)), ValueError, "one number a row"),
        (Gradient(lambda f, y: (f - y).sum(-1), lambda f, y: (f - y).sum(-1)), ValueError, r".*gives \(2, 3\) for"),
        (Gradient(lambda f, y: 1.0, lambda f, y: f - y), TypeError, "must return a tensor"),
    ],
)
def test_a_loss_must_give_one_number_a_row(loss, error, words, count):
    for outputs in (1, 2):
        models = replicate(lambda outputs=outputs: mlp(3, (4,), outputs).double(), range(count))
        before = [flat(model) for model in models]
        with pytest.raises(error, match="loss .*" + words.replace("{O}", str(outputs))):
            train_ensemble(models, data(9, outputs=outputs), loss=loss, epochs=2)
        assert all(torch.equal(a, flat(model)) for a, model in zip(before, models))
    X, y = data(2)
    model = mlp(3).double()
    with pytest.raises(error, match="loss .*" + words.replace("{O}", "1")):
        train(model, X[:1], y[:1], loss=loss, epochs=2)
    with pytest.raises(error, match="loss .*" + words.replace("{O}", "1")):
        grid_search([model], data(9), [1.0], loss=loss, epochs=2)


def test_a_loss_with_a_gradient_of_its_own():
    ends = []
    for loss in ("squared", Gradient(lambda f, y: (f - y).square().sum(-1) / 2, lambda f, y: f - y)):
        (model,) = replicate(lambda: mlp(3).double(), [0])
        train(model, *data(20), loss=loss, epochs=20)
        ends.append(flat(model))
    torch.testing.assert_close(*ends)


def test_validation_judges_by_another_criterion():
    """Trained on squares, kept by absolute errors, or by how many labels lie within 0.2: that has no gradient."""
    X, y = data(25)
    held = data(200, seed=9)
    criteria = {
        None: lambda f, y: (f - y).square().sum(-1) / 2,
        "absolute": lambda f, y: (f - y).abs().sum(-1),
        "outside": lambda f, y: ((f - y).abs() > 0.2).any(-1),
    }
    ends = {}
    for name, criterion in criteria.items():
        (model,) = replicate(lambda: mlp(3, (30,)).double(), [0])
        recipe = {"l2": 0.0, "epochs": 200, "learning_rate": (3e-2, 1e-2), "patience": 40}
        run = train(model, X, y, validation=held, criterion=criterion if name else None, **recipe)
        assert run.best == pytest.approx(criterion(model(held[0]), held[1][:, None]).double().mean().item(), rel=1e-9)
        ends[name] = run.best_epoch
    assert ends["outside"] != ends[None]
