"""The trainer: its minimum is the ridge solution, its order is its seed's, and bad input stops it before it starts."""

from __future__ import annotations

import copy
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn

import fullcp
from fullcp.training import mlp, replicate, train
from reference import ridge

rng = np.random.default_rng(0)
X = rng.normal(size=(120, 4))
y = X @ np.array([1.0, -2.0, 0.5, 0.0]) + rng.normal(size=120)


def test_linear_network_reaches_the_ridge_solution():
    """l2 means the same to the trainer and to the predictors: at its minimum, refinement has nothing to do."""
    model = nn.Linear(4, 1, bias=False).double()
    l2 = [0.5, 5.0, 50.0, 1.0]
    train(model, X, y, l2=l2, epochs=1500, batch_size=120, learning_rate=(3e-2, 1e-6))
    np.testing.assert_allclose(model.weight.detach()[0], ridge(X, y[:, None], np.array(l2))[:, 0], atol=1e-5)
    plain = fullcp.FullConformalRegressor(model, l2=l2).conformalize(X, y).predict(X)
    refined = fullcp.FullConformalRegressor(model, l2=l2, refine=True).conformalize(X, y).predict(X)
    np.testing.assert_allclose(plain, refined, atol=1e-4)


def test_mini_batches_have_the_same_minimum():
    models = [mlp(4).double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model, batch_size in zip(models, (120, 50)):  # 50 leaves a smaller last batch
        train(model, X, y, l2=20.0, epochs=800, batch_size=batch_size)
    f = [model(torch.from_numpy(X)).detach() for model in models]
    assert (f[0] - f[1]).abs().max() < 0.05 * f[0].abs().max()


def test_seed_fixes_everything():
    start = mlp(4)
    runs = []
    for seed in (0, 0, 1):
        model = copy.deepcopy(start)
        state = torch.get_rng_state()
        losses = train(model, X, y, epochs=5, batch_size=32, seed=seed).losses
        assert torch.equal(state, torch.get_rng_state())
        runs.append((losses, model[0].weight.detach()))
    assert runs[0][0] == runs[1][0]
    assert torch.equal(runs[0][1], runs[1][1])
    assert not torch.equal(runs[0][1], runs[2][1])


def test_model_comes_back_in_its_modes_without_gradients():
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 1)).eval()
    model[2].train()
    before = model[2].running_mean.clone()
    train(model, X, y, epochs=2)
    assert [m.training for m in model] == [False, False, True, False]
    assert all(p.grad is None for p in model.parameters())
    assert not torch.equal(before, model[2].running_mean)  # it did train


def test_flat_and_several_outputs():
    flat = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))
    assert (
        train(flat, X, y, epochs=30).losses[-1]
        < train(flat, X, y, epochs=1, learning_rate=(1e-6, 1e-6)).losses[0] + 1.0
    )
    many = mlp(4, outputs=2)
    losses = train(many, X, np.stack([y, -y], 1), epochs=30).losses
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(("hidden", "threads"), [(50, 1), (300_000, 2)])
def test_small_steps_take_one_thread_and_give_it_back(hidden, threads):
    seen = []

    class Watches(nn.Sequential):
        def forward(self, x):
            seen.append(torch.get_num_threads())
            return super().forward(x)

    torch.set_num_threads(2)
    try:
        train(Watches(*mlp(4, (hidden,))), X[:16], y[:16], epochs=1)
        assert seen[-1] == threads
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_a_last_row_alone_is_no_batch():
    """BatchNorm cannot train on one row: 33 rows in batches of 32 are one batch."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    assert len(train(model, X[:33], y[:33], epochs=2, batch_size=32).losses) == 2


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"epochs": 0}, ValueError, "epochs must be at least 1, got 0"),
        ({"epochs": 1.5}, TypeError, "epochs must be a whole number"),
        ({"batch_size": -3}, ValueError, "batch_size must be at least 1"),
        ({"learning_rate": 0.1}, TypeError, "learning_rate must be two numbers"),
        ({"learning_rate": (1e-3, 1e-2)}, ValueError, "0 < last <= first"),
        ({"l2": -1}, ValueError, "l2 must be finite and not negative"),
        ({"y": y[:-1]}, ValueError, "X and y must have the same length"),
        ({"y": np.stack([y, y], 1)}, ValueError, "y has 2 column"),
    ],
)
def test_bad_input(changes, error, words):
    arguments = {"X": X, "y": y, **changes}
    model = mlp(4)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(error, match=words):
        train(model, arguments.pop("X"), arguments.pop("y"), **arguments)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


@pytest.mark.parametrize("l2", [1.0, np.ones(4), [1.0] * 4, torch.ones(4), "marglik"])
def test_only_a_tuned_network_has_a_marginal_likelihood(l2):
    recipe = {} if isinstance(l2, str) else {"validation": (X[:9], y[:9])}
    run = train(mlp(4), X, y, l2=l2, epochs=100, **recipe)
    assert np.isfinite(run.best)
    assert run.tuned == (isinstance(l2, str))
    assert run.log_marginal_likelihood == (-run.best if run.tuned else None)


def test_divergence_names_epoch_and_rate():
    with pytest.raises(ValueError, match=r"training diverged: .* in epoch \d+, step \d+ \(learning rate .*"):
        train(mlp(4), 1e30 * X, y, epochs=50, learning_rate=(1e9, 1e9))


def test_initial_weights_are_those_of_their_seed_on_several_threads():
    def weight(seed):
        return replicate(lambda: mlp(50, (200,)), [seed])[0][0].weight[0, 0].item()

    state, interval = torch.get_rng_state(), sys.getswitchinterval()
    expected = [weight(seed) for seed in range(200)]
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(weight, range(200))) == expected
    finally:
        sys.setswitchinterval(interval)
    assert torch.equal(torch.get_rng_state(), state)
