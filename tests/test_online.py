"""Tuning during training against the same in plain torch; shared, interrupted and diverging runs; and grid search."""

from __future__ import annotations

import copy
from math import cos, pi

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fullcp
from fullcp.training import DivergenceWarning, Schedule, grid_search, mlp, online, replicate, train, train_ensemble
from fullcp.training import checkpoint as checkpoint_module
from fullcp.training import trainer as trainer_module
from reference import dense_jacobian, log_marginal_likelihood

F64 = torch.float64
SCHEDULE = Schedule(burn_in=20, every=10, steps=6, learning_rate=(5e-2, 1e-2))


def data(rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(rows, 2, generator=generator, dtype=F64)
    return X, torch.sin(2 * X[:, 0]) + 0.2 * torch.randn(rows, generator=generator, dtype=F64)


def networks(count):
    return replicate(lambda: mlp(2, (4,), activation=nn.Tanh).double(), range(count))


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def plainly(model, X, y, *, epochs, rates, schedule):
    """The recipe for one network in full batches, all derivatives by autograd."""
    parameters = list(model.parameters())
    sizes = [p.numel() for p in parameters]
    groups = len(sizes) if schedule.structure == "layer" else 1
    optimizer = torch.optim.Adam(parameters, lr=rates[0])
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs, eta_min=rates[1])
    hyper = torch.zeros(groups + 1, dtype=F64, requires_grad=True)  # log precisions, log noise
    climber = torch.optim.Adam([hyper])
    looks = [e for e in range(1, epochs + 1) if e >= schedule.burn_in and (e - schedule.burn_in) % schedule.every == 0]
    total, taken = len(looks) * schedule.steps, 0
    best = (-np.inf, None, None, None)
    expand = torch.repeat_interleave(torch.arange(len(sizes)) if groups > 1 else torch.zeros(len(sizes), dtype=int),
                                     torch.tensor(sizes))  # fmt: skip
    for epoch in range(1, epochs + 1):
        optimizer.zero_grad()
        d, v = hyper.detach()[:-1].exp()[expand], (2 * hyper.detach()[-1]).exp()
        theta = torch.cat([p.reshape(-1) for p in parameters])
        (((y - model(X)[:, 0]).square().sum() + (v * d * theta.square()).sum()) / (2 * len(y))).backward()
        optimizer.step()
        decay.step()
        if epoch not in looks:
            continue
        f, phi = dense_jacobian(model, X)
        e, phi, theta = y - f[:, 0], phi[:, 0], theta.detach()
        theta = torch.cat([p.detach().reshape(-1) for p in parameters])
        for _ in range(schedule.steps):
            first, last = schedule.learning_rate
            climber.param_groups[0]["lr"] = last + (first - last) * (1 + cos(pi * taken / total)) / 2
            climber.zero_grad()
            (-log_marginal_likelihood(phi, e, theta, hyper[:-1].exp()[expand], (2 * hyper[-1]).exp())).backward()
            climber.step()
            taken += 1
        with torch.no_grad():
            value = log_marginal_likelihood(phi, e, theta, hyper[:-1].exp()[expand], (2 * hyper[-1]).exp()).item()
        if value > best[0]:
            best = (value, epoch, theta, hyper.detach().clone())
    value, epoch, theta, hyper = best
    return value, epoch, theta, ((2 * hyper[-1]).exp() * hyper[:-1].exp()).numpy(), hyper[-1].exp().item()


@pytest.mark.parametrize("structure", ["layer", "scalar"])
@pytest.mark.parametrize("rows", [25, 7])  # more and fewer rows than parameters
def test_it_is_the_recipe_in_plain_torch(structure, rows):
    X, y = data(rows)
    (model,) = networks(1)
    schedule = Schedule(20, 10, 6, (5e-2, 1e-2), structure)
    value, epoch, theta, l2, noise = plainly(
        copy.deepcopy(model), X, y, epochs=80, rates=(2e-2, 1e-3), schedule=schedule
    )
    run = train(model, X, y, l2="marglik", epochs=80, learning_rate=(2e-2, 1e-3), tuning=schedule)
    assert run.best_epoch == epoch
    assert run.log_marginal_likelihood == pytest.approx(value, abs=1e-2)
    np.testing.assert_allclose(run.l2, l2 if structure == "layer" else l2.repeat(4), rtol=5e-3)
    assert run.noise == pytest.approx(noise, rel=2e-3)
    torch.testing.assert_close(flat(model), theta, atol=2e-3, rtol=0)


def test_together_and_alone_in_blocks_and_after_an_interruption(tmp_path, monkeypatch):
    pairs = [data(n, seed=n) for n in (25, 18, 11, 30)]
    recipe = {"l2": "marglik", "epochs": 60, "batch_size": 16, "tuning": SCHEDULE}
    together = networks(4)
    runs = train_ensemble(together, pairs, **recipe)
    for b, model in enumerate(networks(4)):
        alone = train(model, *pairs[b], seed=b, **recipe)
        np.testing.assert_allclose(alone.l2, runs[b].l2, rtol=1e-6)
        assert alone.best_epoch == runs[b].best_epoch
        assert alone.log_marginal_likelihood == pytest.approx(runs[b].log_marginal_likelihood, rel=1e-6)
        torch.testing.assert_close(flat(model), flat(together[b]), atol=1e-7, rtol=0)
    monkeypatch.setattr(online, "_MATRICES", 1)
    monkeypatch.setattr(online, "_GRADIENTS", 1)
    blocks = networks(4)
    for run, expected in zip(train_ensemble(blocks, pairs, **recipe), runs):
        np.testing.assert_allclose(run.l2, expected.l2, rtol=1e-6)
    monkeypatch.undo()

    monkeypatch.setattr(checkpoint_module, "_EVERY", 0.0)
    genuine = trainer_module.track

    def stops(steps, description, total):
        for i, step in enumerate(genuine(steps, description, total)):
            if i == 33:
                raise KeyboardInterrupt
            yield step

    monkeypatch.setattr(trainer_module, "track", stops)
    with pytest.raises(KeyboardInterrupt):
        train_ensemble(networks(4), pairs, checkpoint=tmp_path / "run", **recipe)
    monkeypatch.setattr(trainer_module, "track", genuine)
    resumed = networks(4)
    again = train_ensemble(resumed, pairs, checkpoint=tmp_path / "run", **recipe)
    for b in range(4):
        assert torch.equal(flat(resumed[b]), flat(together[b]))
        np.testing.assert_array_equal(again[b].l2, runs[b].l2)
        assert again[b].noise == runs[b].noise


def test_a_network_that_diverges_takes_nobody_with_it():
    pairs = [data(20, seed=b) for b in range(3)]
    recipe = {"l2": "marglik", "epochs": 40, "tuning": SCHEDULE}
    expected = train_ensemble(networks(3), pairs, **recipe)
    wild = [pairs[0], tuple(1e200 * t for t in pairs[1]), pairs[2]]
    with pytest.warns(DivergenceWarning, match="network 1"):
        runs = train_ensemble(networks(3), wild, **recipe)
    for b in (0, 2):
        np.testing.assert_allclose(runs[b].l2, expected[b].l2, rtol=1e-9)
    assert runs[1].divergence is not None


@pytest.mark.parametrize("first", [1, 2])  # from which look on
def test_a_network_without_a_marginal_likelihood_takes_nobody_with_it(first, monkeypatch):
    pairs = [data(20, seed=b) for b in range(3)]
    recipe = {"l2": "marglik", "epochs": 40, "tuning": SCHEDULE}
    plain = networks(3)
    expected = train_ensemble(plain, pairs, **recipe)
    genuine, looks = online.evidence_of_many, []

    def overflows(chunks, *arguments, **settings):
        looks.append(0)
        broken = torch.ones(3, 1, 1, 1, dtype=F64)
        broken[1] = torch.inf if len(looks) >= first else 1.0
        return genuine([(phi * broken, e) for phi, e in chunks], *arguments, **settings)

    monkeypatch.setattr(online, "evidence_of_many", overflows)
    models = networks(3)
    before = flat(models[1])
    if first == 1:
        words = "network 1: the marginal likelihood was not finite once up to epoch 39, step 0"
        with pytest.warns(DivergenceWarning, match=words):
            runs = train_ensemble(models, pairs, **recipe)
        assert runs[1].divergence.what == "the marginal likelihood"
        assert torch.equal(flat(models[1]), before)
        with pytest.raises(ValueError, match="training diverged: the validation loss was not finite once"):
            train(networks(1)[0], *pairs[0], validation=(1e200 * pairs[0][0], 1e200 * pairs[0][1]), epochs=3)
    else:
        runs = train_ensemble(models, pairs, **recipe)
        assert runs[1].best_epoch == 20  # the one look that had a value
        assert runs[1].divergence is None
    for b in (0, 2):
        assert torch.equal(flat(models[b]), flat(plain[b]))
        np.testing.assert_array_equal(runs[b].l2, expected[b].l2)


def test_clean_data_without_noise_end_with_the_best_that_was_seen():
    """Repeated rows, fitted exactly: in time S + diag(l2) is singular in float64, or the bounds are reached."""
    X, y = torch.eye(4, dtype=F64).repeat(10, 1), torch.linspace(-1.3, 1.3, 4, dtype=F64).repeat(10)
    recipe = {"l2": "marglik", "epochs": 5000, "learning_rate": (1e-2, 1e-5)}
    models = replicate(lambda: mlp(4, (20,)).float(), range(2))
    other = (torch.randn(40, 4, generator=torch.Generator().manual_seed(0)), y)
    runs = train_ensemble(models, [(X, y), other], **recipe)
    for run in runs:
        assert run.divergence is None
        assert np.isfinite([run.best, run.noise, *run.l2]).all()
    assert runs[0].noise < 1e-2


def test_modules_that_are_no_chains_are_tuned_too():
    class Wrapped(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x)

    pairs = [data(n, seed=n) for n in (20, 14)]
    recipe = {"l2": "marglik", "epochs": 40, "tuning": SCHEDULE}
    runs = [train_ensemble(models, pairs, **recipe) for models in (networks(2), [Wrapped(m) for m in networks(2)])]
    for a, b in zip(*runs):
        np.testing.assert_allclose(a.l2, b.l2, rtol=1e-6)


def test_the_result_goes_to_a_predictor():
    """What training tuned is near what post-hoc tuning finds on the same weights, and the network near its minimum."""
    X, y = data(60)
    model = mlp(2, (10,))
    run = train(model, X, y, l2="marglik", epochs=2000)
    cp = fullcp.FullConformalRegressor(model, l2=run.l2).conformalize(X, y)
    assert cp.shift_ < 0.5
    tuned = fullcp.FullConformalRegressor(model).conformalize(X, y).tuning_
    assert tuned.log_marginal_likelihood == pytest.approx(run.log_marginal_likelihood, abs=1.0)
    assert tuned.noise == pytest.approx(run.noise, rel=0.1)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"epochs": 99}, ValueError, "epochs must be at least tuning.burn_in"),
        ({"loss": lambda f, y: (f - y).abs().sum(-1)}, ValueError, "needs loss='squared'"),
    ],
)
def test_bad_input(changes, error, words):
    with pytest.raises(error, match=words):
        train(mlp(2), *data(9), **{"l2": "marglik", **changes})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"burn_in": 0}, "tuning.burn_in must be at least 1"),
        ({"steps": 0}, "tuning.steps must be at least 1"),
        ({"structure": "parameter"}, "tuning.structure must be one of"),
        ({"learning_rate": (1e-3, 1e-2)}, "tuning.learning_rate must be"),
    ],
)
def test_bad_schedules(arguments, words):
    with pytest.raises(ValueError, match=words):
        Schedule(**arguments)


# Grid search


def test_grid_search_is_a_loop_over_the_grid():
    grid = [1e-2, 1.0, 100.0]
    pairs = [data(n, seed=n) for n in (40, 33)]
    models = networks(2)
    before = [flat(model) for model in models]
    recipe = {"epochs": 40, "batch_size": 16, "learning_rate": (2e-2, 1e-3)}
    found = grid_search(models, pairs, grid, validation=0.2, seed=[5, 8], **recipe)
    assert all(torch.equal(a, flat(m)) for a, m in zip(before, models))
    for b, (X, y) in enumerate(pairs):
        order = np.random.default_rng([5, 8][b]).permutation(len(X))
        held, rest = order[: round(0.2 * len(X))], order[round(0.2 * len(X)) :]
        for value, loss in zip(grid, found[b].losses):
            model = copy.deepcopy(models[b])
            train(model, X[rest], y[rest], l2=value, seed=[5, 8][b], **recipe)
            assert loss == pytest.approx((model(X[held])[:, 0] - y[held]).square().mean().item() / 2, rel=1e-7)
        assert found[b].l2 == grid[int(np.argmin(found[b].losses))]


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"grid": []}, ValueError, "grid must hold finite numbers"),
        ({"grid": [-1.0]}, ValueError, "grid must hold finite numbers"),
        ({"grid": 3}, TypeError, "grid must be numbers"),
        ({"validation": 1.0}, ValueError, "validation must be a share"),
        ({"data": data(1)}, ValueError, "too few to hold out"),
        ({"validation": True}, TypeError, "validation must be a share of the rows"),
        ({"validation": data(9)}, TypeError, "validation must be a share of the rows, .* got tuple"),
        ({"models": []}, ValueError, "models is empty"),
        ({"models": mlp(2)}, TypeError, "models must be a list"),
        ({"models": networks(1) * 2}, ValueError, "same module twice"),
        ({"seed": [1, 2]}, ValueError, "seed has 2 values for 1 networks"),
        ({"seed": "1"}, TypeError, "seed must be a whole number"),
        ({"noise": [1.0, 2.0]}, ValueError, "noise has 2 values for 1 networks"),
        ({"noise": -1.0}, ValueError, "noise must be positive"),
        ({"epochs": 0}, ValueError, "epochs must be at least 1"),
        ({"epcohs": 3}, TypeError, r"grid_search\(\) got an unexpected keyword argument 'epcohs'"),
        ({"l2": 3.0}, TypeError, r"grid_search\(\) got an unexpected keyword argument 'l2'"),
    ],
)
def test_bad_grids(changes, error, words):
    with pytest.raises(error, match=words):
        grid_search(**{"models": networks(1), "data": data(20), "epochs": 2, **changes})


def test_seeds_noise_and_loaders_of_a_grid_search():
    pairs = [data(n, seed=n) for n in (40, 33)]
    grid, models = [1.0, 100.0], networks(2)
    recipe = {"epochs": 20, "batch_size": 16}
    expected = grid_search(models, pairs, grid, seed=[3, 4], noise=[0.5, 2.0], **recipe)
    loaders = [DataLoader(TensorDataset(*pair), batch_size=9) for pair in pairs]
    for b, model in enumerate(models):  # each alone: the noise is that of its network, for all values of the grid
        (alone,) = grid_search([model], pairs[b], grid, seed=np.int64(3 + b), noise=[0.5, 2.0][b], **recipe)
        np.testing.assert_allclose(alone.losses, expected[b].losses, rtol=1e-9)
    for seed in (np.int64(3), np.array([3, 4]), torch.tensor([3, 4])):
        found = grid_search(models, loaders, grid, seed=seed, noise=np.array([0.5, 2.0]), **recipe)
        assert [search.losses for search in found] == [search.losses for search in expected]
    shared = grid_search(models, loaders[0], grid, seed=-5, **recipe)
    assert [search.losses for search in shared] == [
        search.losses for search in grid_search(models, pairs[0], grid, seed=[-5, -4], **recipe)
    ]


def test_a_grid_that_diverges_throughout_is_refused():
    X, y = data(20)
    with pytest.raises(ValueError, match="network 0 diverged for every l2"):
        grid_search(networks(1), (1e200 * X, 1e200 * y), [1.0, 2.0], epochs=3)
