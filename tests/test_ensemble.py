"""Networks trained together equal the same networks trained alone, by plain torch, in any way of running them."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cases
from fullcp.training import DivergenceWarning, Schedule, mlp, replicate, train, train_ensemble
from fullcp.training import checkpoint as checkpoint_module
from fullcp.training import trainer as trainer_module
from fullcp.training.build import build_stack
from fullcp.training.modules import Functional, Loop
from fullcp.training.shuffling import permutations, plan

F64 = torch.float64


def data(rows, inputs=3, outputs=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(rows, inputs, generator=generator, dtype=F64)
    y = torch.sin(X.sum(1, keepdim=True)) * torch.arange(1, outputs + 1) + 0.1 * torch.randn(
        rows, outputs, generator=generator, dtype=F64
    )
    return X, y[:, 0] if outputs == 1 else y


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


class Wrapped(nn.Module):
    """The same network as a module that is no nn.Sequential."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


def plainly(model, X, y, *, l2, epochs, batch_size, learning_rate, seed):
    """The recipe in plain torch, one network, with the library's order of the rows."""
    model.train()
    first, last = learning_rate
    N = len(X)
    parameters = list(model.parameters())
    optimizer = torch.optim.Adam(parameters, lr=first)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs, eta_min=last)
    steps = plan(torch.tensor([N]), batch_size)
    for epoch in range(epochs):
        order = permutations(torch.tensor([seed]), epoch, torch.tensor([N]), N)[0]
        for step in steps:
            rows = order[step.start : step.stop]
            optimizer.zero_grad()
            f = model(X[rows]).view(len(rows), -1)
            loss = (y[rows].view(len(rows), -1) - f).square().sum(1).mean() / 2
            penalty = sum(p.square().sum() for p in parameters) * l2 / N / 2
            (loss + penalty).backward()
            optimizer.step()
        schedule.step()
    return model


@pytest.mark.parametrize("name", [name for name in cases.NETWORKS if "dropout" not in name])
def test_gradients_of_a_stack_are_those_of_each_network(name):
    case = cases.NETWORKS[name]
    torch.manual_seed(0)
    models = [case.make().double() for _ in range(3)]
    X = torch.randn(3, 7, *case.row_shape, dtype=F64)
    stack = build_stack(models, X[0])
    f, phi = stack.jacobian(X)
    predicted = stack.predict(X)
    stack.gradients(X, lambda block, f: torch.cos(f))  # last: BatchNorm counts what it sees
    for b, model in enumerate(models):
        model = copy.deepcopy(model).train()
        out = model(X[b]).view(7, -1)
        expected = torch.autograd.grad(out, list(model.parameters()), torch.cos(out.detach()))
        torch.testing.assert_close(stack.grad[b], torch.cat([g.reshape(-1) for g in expected]), atol=1e-11, rtol=1e-9)
        model = copy.deepcopy(models[b]).eval()
        out = model(X[b]).view(7, -1)
        torch.testing.assert_close(predicted[b], out.detach())
        torch.testing.assert_close(f[b], out.detach())
        for i, o in ((2, 0), (6, out.shape[1] - 1)):
            expected = torch.autograd.grad(out[i, o], list(model.parameters()), retain_graph=True)
            torch.testing.assert_close(
                phi[b, i, o], torch.cat([g.reshape(-1) for g in expected]), atol=1e-11, rtol=1e-9
            )


@pytest.mark.parametrize(
    "activation",
    [nn.GELU, lambda: nn.GELU("tanh"), nn.ReLU, nn.Tanh, nn.Sigmoid, nn.SiLU, lambda: nn.ELU(0.7),
     lambda: nn.LeakyReLU(0.2), lambda: nn.Softplus(2.0, 5.0), nn.Identity],
)  # fmt: skip
def test_activations_by_hand_are_those_of_autograd(activation):
    torch.manual_seed(0)
    models = [mlp(3, (5, 4), activation=activation).double() for _ in range(2)]
    X = 3 * torch.randn(2, 9, 3, dtype=F64)
    stack = build_stack(models, X[0])
    assert stack.name == "batched matrix products"
    stack.gradients(X, lambda block, f: f + 1)
    for b, model in enumerate(models):
        out = model(X[b])
        expected = torch.autograd.grad(out, list(model.parameters()), out.detach() + 1)
        torch.testing.assert_close(stack.grad[b], torch.cat([g.reshape(-1) for g in expected]))


def test_what_looks_like_a_chain_but_is_none_is_not_taken_for_one():
    torch.manual_seed(0)
    x = torch.randn(4, 3)
    hooked = [mlp(3) for _ in range(2)]
    for model in hooked:
        model[0].register_forward_hook(lambda module, inputs, output: 2 * output)
    halved = [nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)) for _ in range(2)]
    for model in halved:
        model[0].weight.requires_grad_(False)
    for models in (hooked, halved, [Wrapped(mlp(3)) for _ in range(2)]):
        stack = build_stack(models, x)
        assert isinstance(stack, Functional)
        for b, model in enumerate(models):
            torch.testing.assert_close(stack.predict(x.expand(2, 4, 3))[b], model(x).detach())
    assert isinstance(build_stack([nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).eval()], x), Loop)


class Constant(nn.Module):
    """A function and a number among the attributes, neither of them a module."""

    def __init__(self, function=torch.tanh, factor=1.0):
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 1)
        self.function, self.factor = function, factor

    def forward(self, x):
        return self.factor * self.last(self.function(self.first(x)))


@pytest.mark.parametrize(
    "make",
    [
        lambda odd: nn.Sequential(nn.Linear(3, 4), nn.LeakyReLU(0.9 if odd else 0.01), nn.Linear(4, 1)),
        lambda odd: Constant(function=torch.relu if odd else torch.tanh),
        lambda odd: Constant(factor=5.0 if odd else 1.0),
        lambda odd: Wrapped(nn.Sequential(nn.Linear(3, 4), nn.Softplus(3.0 if odd else 1.0), nn.Linear(4, 1))),
    ],
)
def test_networks_that_differ_in_a_constant_keep_it(make):
    """The odd one stands in the middle; the others must not pass for it."""
    models = replicate(lambda: make(False).double(), range(5))
    models[2:3] = replicate(lambda: make(True).double(), [2])
    start = copy.deepcopy(models)
    runs = train_ensemble(models, data(30), epochs=5, batch_size=16)
    for b, model in enumerate(start):
        run = train(model, *data(30), epochs=5, batch_size=16, seed=b)
        np.testing.assert_allclose(runs[b].losses, run.losses, rtol=1e-9)
        torch.testing.assert_close(flat(model), flat(models[b]), atol=1e-11, rtol=1e-9)


def test_rates_of_dropout_are_each_networks_own():
    """They show in training alone."""

    def make(rates):
        return [nn.Sequential(nn.Linear(3, 4), nn.Dropout(rate), nn.Linear(4, 1)).double() for rate in rates]

    x = torch.randn(4, 3, dtype=F64)
    assert isinstance(build_stack(make([0.1, 0.1, 0.1]), x), Functional)
    stack = build_stack(make([0.001, 1.0, 0.001]), x)
    stack.gradients(x.expand(3, 4, 3), lambda block, f: torch.ones_like(f))
    assert [bool((g != 0).sum() > 1) for g in stack.grad] == [True, False, True]  # all but the last bias
    harmless = [Constant().double() for _ in range(3)]
    harmless[1].name = "the second"
    assert isinstance(build_stack(harmless, x), Functional)


def test_networks_are_asked_once_however_often_they_are_held():
    calls = []

    class Counts(nn.Linear):
        def forward(self, x):
            calls.append(0)
            return super().forward(x)

    x = torch.randn(4, 3)
    build_stack([Counts(3, 1)] * 50, x)
    assert len(calls) < 10
    models, calls[:] = [Counts(3, 1) for _ in range(50)], []
    build_stack([*models, *models], x)
    assert 50 <= len(calls) < 60


@settings(max_examples=25)
@given(
    counts=st.lists(st.integers(2, 40), min_size=1, max_size=4),
    batch_size=st.integers(1, 50),
    outputs=st.integers(1, 2),
    wrap=st.booleans(),
    seed=st.integers(-(2**40), 2**40),
)
def test_together_alone_and_by_plain_torch(counts, batch_size, outputs, wrap, seed):
    """Ragged data, own penalties and own seeds: each network is the one that torch.optim.Adam would make."""
    models = replicate(lambda: mlp(3, (4,), outputs).double(), range(len(counts)))
    models = [Wrapped(model) if wrap else model for model in models]
    start = copy.deepcopy(models)
    pairs = [data(count, outputs=outputs, seed=b) for b, count in enumerate(counts)]
    l2 = [0.3 * (b + 1) for b in range(len(counts))]
    recipe = {"epochs": 4, "batch_size": batch_size, "learning_rate": (1e-2, 1e-3)}
    runs = train_ensemble(models, pairs, l2=l2, seed=seed, **recipe)
    for b, (X, y) in enumerate(pairs):
        alone = copy.deepcopy(start[b])
        run = train(alone, X, y, l2=l2[b], seed=seed + b, **recipe)
        torch.testing.assert_close(flat(alone), flat(models[b]), atol=1e-11, rtol=1e-9)
        np.testing.assert_allclose(run.losses, runs[b].losses, rtol=1e-9)
        plain = plainly(start[b], X, y, l2=l2[b], seed=seed + b, **recipe)
        torch.testing.assert_close(flat(plain), flat(models[b]), atol=1e-9, rtol=1e-7)


def test_three_ways_train_the_same_network(monkeypatch):
    X, y = data(30)
    ends = []
    for way in (None, Functional, Loop):
        if way is not None:
            monkeypatch.setattr(trainer_module, "build_stack", lambda models, x, way=way: way(models))
        models = replicate(lambda: mlp(3, (4, 4)).double(), range(3))
        train_ensemble(models, [data(n, seed=n) for n in (30, 17, 9)], epochs=6, batch_size=8)
        ends.append(torch.stack([flat(model) for model in models]))
    torch.testing.assert_close(ends[0], ends[1], atol=1e-11, rtol=1e-9)
    torch.testing.assert_close(ends[0], ends[2], atol=1e-11, rtol=1e-9)


def test_noise_leaves_the_minimum_where_it_is():
    X, y = data(40)
    models = replicate(lambda: nn.Linear(3, 1).double(), [0, 0])
    train_ensemble(models, (X, y), l2=3.0, noise=[1.0, 0.3], seed=[0, 0], epochs=1500, learning_rate=(3e-2, 1e-6))
    torch.testing.assert_close(flat(models[0]), flat(models[1]), atol=1e-5, rtol=0)


def test_networks_with_dropout_and_batchnorm_train_together():
    make = lambda: nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Dropout(0.1), nn.Linear(8, 1))  # noqa: E731
    models = replicate(make, range(3))
    pairs = [tuple(t.float() for t in data(n, seed=n)) for n in (40, 33, 21)]
    runs = train_ensemble(models, pairs, epochs=40, batch_size=16)
    for model, run in zip(models, runs):
        assert run.losses[-1] < run.losses[0]
        assert model[1].running_mean.abs().sum() > 0
        assert int(model[1].num_batches_tracked) > 0
        assert model.training


def loader_of(X, y, **arguments):
    return DataLoader(TensorDataset(X, y), batch_size=7, **arguments)


def test_loaders_are_data_and_validation():
    pairs = [data(20, seed=b) for b in range(2)]
    held = [data(15, seed=b + 5) for b in range(2)]
    recipe = {"epochs": 6, "batch_size": 8}
    ends = []
    for wrap in (lambda X, y: (X, y), loader_of):
        found = []
        for rows, judged in (
            ([wrap(*pair) for pair in pairs], [wrap(*pair) for pair in held]),
            (wrap(*pairs[0]), wrap(*held[0])),
            ([wrap(*pairs[0]), pairs[1]], wrap(*held[1])),
        ):
            models = replicate(lambda: mlp(3, (4,)).double(), range(2))
            runs = train_ensemble(models, rows, validation=judged, **recipe)
            found += [run.best for run in runs] + [run.losses[-1] for run in runs]
        model = mlp(3).double() if not ends else None
        assert model is None or train(model, loader_of(*pairs[0]), validation=wrap(*held[0]), **recipe).best
        ends.append(found)
    np.testing.assert_array_equal(*ends)


# The order of the rows


@settings(max_examples=50)
@given(counts=st.lists(st.integers(1, 70), min_size=1, max_size=5), epoch=st.integers(0, 10**6), seed=st.integers())
def test_orders_are_permutations_that_no_neighbour_changes(counts, epoch, seed):
    seeds = torch.tensor([(seed + b) % 2**62 for b in range(len(counts))])
    orders = permutations(seeds, epoch, torch.tensor(counts), max(counts))
    for b, count in enumerate(counts):
        own = orders[b, :count]
        assert sorted(own.tolist()) == list(range(count))
        assert orders[b, count:].tolist() == list(range(count, max(counts)))
        alone = permutations(seeds[b : b + 1], epoch, torch.tensor([count]), count, ragged=False)
        assert torch.equal(alone[0], own)


def test_orders_look_random():
    """Every order of four rows equally often, for consecutive seeds and for consecutive epochs."""
    draws = 24_000
    fours = torch.full((draws,), 4)
    by_seed = permutations(torch.arange(draws), 0, fours, 4)
    by_epoch = torch.cat([permutations(torch.tensor([7]), e, fours[:1], 4) for e in range(2400)])
    for orders in (by_seed, by_epoch):
        codes = (orders * torch.tensor([64, 16, 4, 1])).sum(1)
        _, counts = codes.unique(return_counts=True)
        expected = len(orders) / 24
        assert len(counts) == 24
        assert ((counts - expected) ** 2 / expected).sum() < 49.7  # chi-square, 23 degrees of freedom, 0.1 %


@settings(max_examples=50)
@given(counts=st.lists(st.integers(1, 60), min_size=1, max_size=5), batch_size=st.integers(1, 70))
def test_every_row_is_in_one_batch(counts, batch_size):
    steps = plan(torch.tensor(counts), batch_size)
    for b, count in enumerate(counts):
        sizes = [step.stop - step.start if step.sizes is None else int(step.sizes[b]) for step in steps]
        assert sum(sizes) == count
        assert [step.start for step in steps] == [k * batch_size for k in range(len(steps))]
        assert all(size == batch_size for size in sizes[: max(0, count // batch_size - 1)])
        assert not (batch_size > 1 and count > 1 and 1 in sizes)


# Divergence, early stopping, interruption


def test_one_network_diverges_and_the_others_are_unharmed():
    pairs = [data(20, seed=b) for b in range(3)]
    clean = replicate(lambda: mlp(3, (4,)).double(), range(3))
    train_ensemble(clean, pairs, epochs=10, batch_size=8)
    models = replicate(lambda: mlp(3, (4,)).double(), range(3))
    before = flat(models[1])
    wild = [pairs[0], (pairs[1][0] * 1e200, pairs[1][1] * 1e200), pairs[2]]
    with pytest.warns(
        DivergenceWarning, match=r"1 of 3 networks diverged; network 1: .* step 0 \(learning rate 0.01\)"
    ):
        runs = train_ensemble(models, wild, epochs=10, batch_size=8)
    assert runs[1].divergence.epoch == 0
    assert runs[1].divergence.learning_rate == pytest.approx(1e-2)
    assert torch.equal(flat(models[1]), before)
    for b in (0, 2):
        torch.testing.assert_close(flat(models[b]), flat(clean[b]), atol=1e-12, rtol=1e-10)
        assert runs[b].divergence is None
        assert np.isfinite(runs[b].losses).all()
    with pytest.raises(ValueError, match="every network of 3"):
        train_ensemble(models, (pairs[1][0] * 1e200, pairs[1][1] * 1e200), epochs=2)


def test_divergence_in_the_middle_names_the_step(monkeypatch):
    """A loss that explodes from a certain row on: its batch is the step that is named."""
    X, y = data(12)
    X[5] = 1e200
    y[5] = 1e200
    order = permutations(torch.tensor([3]), 0, torch.tensor([12]), 12)[0].tolist()
    with pytest.raises(ValueError, match=rf"epoch 0, step {order.index(5) // 4} "):
        train(mlp(3, (4,)).double(), X, y, epochs=3, batch_size=4, seed=3)


def test_early_stopping_keeps_the_best_weights():
    pairs = [data(25, seed=b) for b in range(3)]
    held = [data(200, seed=9) for _ in range(3)]
    models = replicate(lambda: mlp(3, (30,)).double(), range(3))
    start = copy.deepcopy(models)
    recipe = {"l2": 0.0, "epochs": 400, "learning_rate": (3e-2, 1e-2)}
    runs = train_ensemble(models, pairs, validation=held, patience=15, **recipe)
    assert len({run.epochs for run in runs}) > 1
    for b, run in enumerate(runs):
        assert run.epochs == min(400, run.best_epoch + 15)
        found = (models[b](held[b][0])[:, 0] - held[b][1]).square().mean().item() / 2
        assert found == pytest.approx(run.best, rel=1e-9)
        alone = copy.deepcopy(start[b])
        again = train(alone, *pairs[b], validation=held[b], patience=15, seed=b, **recipe)
        assert (again.epochs, again.best_epoch) == (run.epochs, run.best_epoch)
        torch.testing.assert_close(flat(alone), flat(models[b]), atol=1e-9, rtol=1e-7)
        shorter = copy.deepcopy(start[b])
        seen = train(shorter, *pairs[b], validation=held[b], seed=b, **recipe)  # no patience: the whole way
        assert seen.epochs == 400
        assert seen.best <= run.best


class InterruptionError(Exception):
    pass


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path, monkeypatch):
    pairs = [data(n, seed=n) for n in (25, 20, 14)]
    pairs[2] = tuple(1e200 * t for t in pairs[2])  # one diverges before the interruption
    recipe = {
        "epochs": 60,
        "batch_size": 8,
        "validation": data(50, seed=9),
        "patience": 12,
        "learning_rate": (0.1, 0.01),
    }
    whole = replicate(lambda: mlp(3, (6,)).double(), range(3))
    with pytest.warns(DivergenceWarning):
        expected = train_ensemble(whole, pairs, **recipe)
    path = tmp_path / "run.safetensors"
    monkeypatch.setattr(checkpoint_module, "_EVERY", 0.0)
    genuine = trainer_module.track

    def stops_after(count):
        def track(steps, description, total):
            for i, step in enumerate(genuine(steps, description, total)):
                if i == count:
                    raise InterruptionError
                yield step

        return track

    models = replicate(lambda: mlp(3, (6,)).double(), range(3))
    before = [flat(model) for model in models]
    for count in (0, 7, 9, 11):
        monkeypatch.setattr(trainer_module, "track", stops_after(count))
        with pytest.raises(InterruptionError):
            train_ensemble(models, pairs, checkpoint=path, **recipe)
        assert all(torch.equal(a, flat(m)) for a, m in zip(before, models))  # nothing is half-trained
    monkeypatch.setattr(trainer_module, "track", genuine)
    for _ in range(2):  # and once over, it is read back
        models = replicate(lambda: mlp(3, (6,)).double(), range(3))
        with pytest.warns(DivergenceWarning):
            runs = train_ensemble(models, pairs, checkpoint=path, **recipe)
        for b in range(3):
            assert torch.equal(flat(models[b]), flat(whole[b]))
            assert (runs[b].epochs, runs[b].best_epoch) == (expected[b].epochs, expected[b].best_epoch)
            np.testing.assert_array_equal(runs[b].losses, expected[b].losses)
    for change in ({"batch_size": 9}, {"epochs": 61}, {"l2": 2.0}, {"seed": 5}, {"patience": 13}):
        with pytest.raises(ValueError, match="checkpoint holds another run"):
            train_ensemble(models, pairs, checkpoint=path, **{**recipe, **change})
    with pytest.raises(ValueError, match="folder that does not exist"):
        train(mlp(3), *pairs[0], checkpoint=tmp_path / "no" / "file")


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"models": []}, ValueError, "models is empty"),
        ({"models": [3, 4]}, TypeError, "models must be torch modules"),
        ({"models": "twice"}, ValueError, "same module twice"),
        ({"models": [mlp(3), mlp(3, (7,))]}, ValueError, "one architecture: model 1"),
        ({"models": [mlp(3), mlp(3).double()]}, ValueError, "share one device and dtype"),
        ({"data": 7}, TypeError, "data must be a pair"),
        ({"data": [data(9)] * 3}, ValueError, "there are 2 networks, 3 pairs"),
        ({"data": [data(9), 5]}, TypeError, r"data\[1\] must be a pair"),
        ({"data": [data(9), data(9, inputs=4)]}, ValueError, "X of network 1 has rows of shape \\(4,\\)"),
        ({"data": [data(9), data(9, outputs=2)]}, ValueError, "X of network 1 has rows of shape .* with 2 target"),
        ({"data": [data(9), (data(9)[0], data(8)[1])]}, ValueError, "of network 1 must have the same length"),
        ({"l2": [1.0, 2.0, 3.0]}, ValueError, "l2 has 3 values for 2 networks"),
        ({"l2": [1.0, "marglik"]}, ValueError, "for all networks or for none"),
        ({"l2": "magic"}, ValueError, "l2 must be 'marglik'"),
        ({"noise": 0.0}, ValueError, "noise must be positive"),
        ({"noise": [1.0]}, ValueError, "noise has 1 values"),
        ({"seed": [1]}, ValueError, "seed has 1 values"),
        ({"seed": 1.5}, TypeError, "seed must be a whole number"),
        ({"loss": "absolute"}, TypeError, "loss must be 'squared' or a callable"),
        ({"patience": 3}, ValueError, "patience needs validation"),
        ({"validation": data(9), "patience": 0}, ValueError, "patience must be at least 1"),
        ({"validation": data(9, inputs=2)}, ValueError, r"validation: X has rows of shape \(2,\)"),
        ({"validation": data(9), "l2": "marglik"}, ValueError, "give one of them"),
        ({"tuning": 5}, TypeError, "tuning must be a Schedule"),
        ({"tuning": Schedule()}, ValueError, "tuning says when l2='marglik' is tuned, and l2 is given"),
        ({"models": mlp(3)}, TypeError, "models must be a list of torch modules, got one Sequential"),
        ({"models": [mlp(3), torch.jit.trace(mlp(3), torch.ones(1, 3))]}, TypeError, "model 1 is or holds a torch.jit"),
        ({"data": [data(9), 5]}, TypeError, r"data\[1\] must be a pair \(X, y\) or a DataLoader"),
        ({"seed": 2**70}, ValueError, r"seed must be of 64 bits"),
        ({"seed": [1, 2**63]}, ValueError, r"seed must be of 64 bits"),
        ({"seed": [1, 2.5]}, TypeError, "seed must hold whole numbers, got 2.5"),
        ({"seed": True}, TypeError, "seed must be a whole number"),
        ({"noise": True}, TypeError, "noise must be a positive number"),
        ({"noise": "1"}, TypeError, "noise must be a positive number"),
        ({"criterion": "squared"}, ValueError, "criterion needs validation"),
        ({"validation": data(9), "criterion": "absolute"}, TypeError, "criterion must be 'squared' or a callable"),
        ({"validation": data(9), "criterion": lambda f, y: f - y}, ValueError, r"criterion returns .* \(2, 3, 1\)"),
        ({"validation": 5}, TypeError, r"validation must be a pair \(X, y\) or a DataLoader"),
    ],
)  # fmt: skip
def test_bad_input(changes, error, words):
    arguments = {"models": [mlp(3) for _ in range(2)], "data": data(9), "epochs": 3, **changes}
    if arguments["models"] == "twice":
        arguments["models"] = [mlp(3)] * 2
    with pytest.raises(error, match=words):
        train_ensemble(arguments.pop("models"), arguments.pop("data"), **arguments)
