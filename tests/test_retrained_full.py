"""Exact full conformal prediction against a plain loop of trainings, and against ridge regression in closed form."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

import fullcp
from fullcp.predictors import retraining as retraining_module
from fullcp.predictors.retraining import fresh
from fullcp.training import mlp, train

F64 = torch.float64
RECIPE = {"epochs": 25, "learning_rate": (0.05, 0.01), "l2": [0.3, 0.1, 0.5, 0.2]}


def problem(rows=14, points=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(rows + points, 2, generator=generator, dtype=F64)
    y = torch.sin(2 * X[:, 0]) + 0.3 * torch.randn(rows + points, generator=generator, dtype=F64)
    torch.manual_seed(seed)
    model = mlp(2, (5,), activation=nn.Tanh).double()
    train(model, X[:rows], y[:rows], **RECIPE)
    return model, X[:rows], y[:rows], X[rows:]


def retrain(initial, X, y, *, epochs, learning_rate, l2, batch_size=None, seed=0):
    """One training in plain torch; full batches."""
    model = copy.deepcopy(initial)
    parameters = list(model.parameters())
    optimizer = torch.optim.Adam(parameters, lr=learning_rate[0])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs, eta_min=learning_rate[1])
    for _ in range(epochs):
        optimizer.zero_grad()
        penalty = sum(w * p.square().sum() for w, p in zip(l2, parameters)) / 2
        ((((y - model(X)[:, 0]) ** 2).sum() / 2 + penalty) / len(y)).backward()
        optimizer.step()
        schedule.step()
    return (y - model(X)[:, 0]).detach()


def loop_p_values(initial, X, y, points, grid, residuals, **recipe):
    """By definition: train with every candidate, rank the new residual among all."""
    p = np.zeros((len(points), len(grid)))
    for j, x in enumerate(points):
        for k, label in enumerate(grid):
            rho = retrain(initial, torch.cat([X, x[None]]), torch.cat([y, label[None]]), **recipe).numpy()
            if residuals == "absolute":
                p[j, k] = np.mean(np.abs(rho) >= abs(rho[-1]))
            else:
                p[j, k] = min(1, 2 * min(np.mean(rho >= rho[-1]), np.mean(rho <= rho[-1])))
    return p


@pytest.mark.parametrize("residuals", ["absolute", "signed"])
def test_sets_are_those_of_a_plain_loop(residuals):
    model, X, y, points = problem()
    cp = fullcp.RetrainedFullConformalRegressor(model, residuals, candidates=9, seed=4, **RECIPE).conformalize(X, y)
    expected = loop_p_values(fresh(model, 4), X, y, points, cp.grid_, residuals, **RECIPE)
    grid = cp.grid_
    for k, label in enumerate(grid):
        np.testing.assert_allclose(cp.p_value(points, float(label)), expected[:, k], rtol=1e-12)
    for level in (0.5, 0.8):
        for j, pieces in enumerate(cp.predict_set(points, level)):
            inside = [any(low <= label <= high for low, high in pieces) for label in grid.tolist()]
            if (expected[j] > 1 - level + 1e-9).any():
                assert inside == (expected[j] > 1 - level + 1e-9).tolist()


def test_ridge_regression_in_closed_form():
    """Trained to the end, a linear network is ridge regression, and its full conformal sets are known in closed form.

    Bisection finds their ends to within the precision, on coarse grids, and beyond the grid.
    """
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(20, 2, generator=generator, dtype=F64)
    y = X @ torch.tensor([1.0, -0.5], dtype=F64) + 0.5 * torch.randn(20, generator=generator, dtype=F64)
    model = nn.Linear(2, 1).double()
    recipe = {"l2": 1.0, "learning_rate": (0.1, 1e-4)}
    train(model, X, y, epochs=3000, batch_size=20, **recipe)
    points = 1.5 * torch.randn(2, 2, generator=generator, dtype=F64)
    for residuals in ("absolute", "signed"):
        closed = fullcp.FullConformalRegressor(model, score="standard", residuals=residuals, l2=1.0, refine=True)
        closed = closed.conformalize(X, y).predict_interval(points, [0.6, 0.8]).intervals
        candidates = {"absolute": 12, "signed": torch.tensor([0.0, 0.1])}[residuals]
        cp = fullcp.RetrainedFullConformalRegressor(
            model, residuals, candidates=candidates, precision=1e-3, epochs=400, **recipe
        ).conformalize(X, y)
        found = cp.predict_interval(points, [0.6, 0.8]).intervals
        np.testing.assert_allclose(found, closed, atol=2e-3)


def test_precision_finds_ends_between_candidates():
    model, X, y, points = problem()
    arguments = {"seed": 4, **RECIPE}
    fine = fullcp.RetrainedFullConformalRegressor(model, candidates=9, precision=1e-3, **arguments).conformalize(X, y)
    for level in (0.5, 0.8):
        ends = fine.predict_interval(points, level).intervals[:, :, 0]
        for j, pieces in enumerate(fine.predict_set(points, level)):
            assert (pieces[0][0], pieces[-1][1]) == tuple(ends[j].tolist())
            for low, high in pieces:
                for end, outwards in ((low, -2e-3), (high, 2e-3)):
                    assert fine.p_value(points[j : j + 1], end).item() > 1 - level - 1e-12
                    assert fine.p_value(points[j : j + 1], end + outwards).item() <= 1 - level + 1e-12
    assert torch.isinf(fine.predict_interval(points, 0.99).intervals).all()  # 14 rows are too few


def test_nothing_is_trained_twice(monkeypatch):
    model, X, y, points = problem()
    cp = fullcp.RetrainedFullConformalRegressor(model, candidates=9, **RECIPE).conformalize(X, y)
    trained = []
    genuine = retraining_module.Retraining._train
    monkeypatch.setattr(
        retraining_module.Retraining,
        "_train",
        lambda self, x, labels: (trained.append(len(x)), genuine(self, x, labels))[1],
    )
    cp.predict_interval(points, [0.5, 0.8])
    assert sum(trained) == 27
    cp.predict_set(points, 0.6)
    cp.p_value(points, cp.grid_[4].item())
    cp.predict_interval(torch.cat([points, points]))
    assert sum(trained) == 27


def test_an_interruption_costs_what_was_not_written(tmp_path, monkeypatch):
    model, X, y, points = problem()
    monkeypatch.setattr(retraining_module, "_MOST", {"cpu": 5})
    monkeypatch.setattr(retraining_module, "_EVERY", 0.0)
    path = tmp_path / "known.safetensors"
    arguments = {"candidates": 9, "checkpoint": path, **RECIPE}
    expected = fullcp.RetrainedFullConformalRegressor(model, **{**arguments, "checkpoint": None})
    expected = expected.conformalize(X, y).predict_interval(points, [0.5, 0.8]).intervals
    genuine = retraining_module.Retraining._train
    trained = []

    def fails_third(self, x, labels):
        if len(trained) == 2:
            raise KeyboardInterrupt
        trained.append(len(x))
        return genuine(self, x, labels)

    cp = fullcp.RetrainedFullConformalRegressor(model, **arguments).conformalize(X, y)
    monkeypatch.setattr(retraining_module.Retraining, "_train", fails_third)
    with pytest.raises(KeyboardInterrupt):
        cp.predict_interval(points)
    assert trained == [5, 5]
    trained.clear()
    monkeypatch.setattr(
        retraining_module.Retraining, "_train", lambda self, x, y: (trained.append(len(x)), genuine(self, x, y))[1]
    )
    again = fullcp.RetrainedFullConformalRegressor(model, **arguments).conformalize(X, y)
    found = again.predict_interval(points, [0.5, 0.8]).intervals
    assert sum(trained) == 17
    assert torch.equal(found, expected)
    with pytest.raises(ValueError, match="checkpoint holds other retrainings"):
        fullcp.RetrainedFullConformalRegressor(model, **{**arguments, "epochs": 26}).conformalize(X, y)
    with pytest.raises(ValueError, match="folder that does not exist"):
        fullcp.RetrainedFullConformalRegressor(model, **{**arguments, "checkpoint": tmp_path / "a" / "b"}).conformalize(
            X, y
        )


def test_chunks_batches_and_starts():
    model, X, y, points = problem()
    arguments = {"candidates": 9, **RECIPE}
    grids = []
    for changes in ({}, {"memory": "1MB"}, {"start": "trained"}, {"batch_size": 5}):
        cp = fullcp.RetrainedFullConformalRegressor(model, **{**arguments, **changes}).conformalize(X, y)
        grids.append(cp.predict_interval(points, [0.5, 0.8]).intervals)
        assert (cp.predict(points) == model(points)[:, 0].detach().double()).all()
    assert torch.equal(grids[0], grids[1])


def test_coverage_is_exact():
    """One test point and label from each of many data sets: the p-value of the true label is uniform on its steps."""
    torch.manual_seed(0)
    model = mlp(1, (3,), activation=nn.Tanh).double()
    N, sets = 9, 200
    hits = 0
    for s in range(sets):
        generator = torch.Generator().manual_seed(s)
        X = torch.randn(N + 1, 1, generator=generator, dtype=F64)
        y = X[:, 0].abs() + 0.5 * X[:, 0].abs() * torch.randn(N + 1, generator=generator, dtype=F64)
        cp = fullcp.RetrainedFullConformalRegressor(model, l2=0.1, epochs=10, learning_rate=(0.1, 0.01), candidates=2)
        p = cp.conformalize(X[:N], y[:N]).p_value(X[N:], y[N:])
        hits += int(p > 0.2 + 1e-9)
    # Binomial(200, 0.8): 0.1 % in each tail.
    assert 142 <= hits <= 177


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"residuals": "both"}, ValueError, "residuals must be one of"),
        ({"start": "cold"}, ValueError, "start must be one of"),
        ({"precision": 0}, ValueError, "precision must be None or a positive number"),
        ({"precision": True}, TypeError, "precision must be None or a number"),
        ({"precision": "fine"}, TypeError, "precision must be None or a number"),
        ({"epochs": 0}, ValueError, "epochs must be at least 1"),
        ({"batch_size": 0}, ValueError, "batch_size must be at least 1"),
        ({"learning_rate": 0.1}, TypeError, "learning_rate must be two numbers"),
        ({"seed": -1}, ValueError, "seed must be at least 0"),
        ({"candidates": 1}, ValueError, "candidates must be at least 2"),
        ({"l2": -1.0}, ValueError, "l2 must be finite and not negative"),
    ],
)
def test_bad_settings(changes, error, words):
    model, X, y, _ = problem()
    with pytest.raises(error, match=words):
        fullcp.RetrainedFullConformalRegressor(model, **{"l2": 1.0, **changes}).conformalize(X, y)


def test_networks_without_fresh_weights_are_named():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.scale = nn.Linear(2, 1), nn.Parameter(torch.ones(()))

        def forward(self, x):
            return self.scale * self.inner(x)

    _, X, y, points = problem()
    model = Scaled().double()
    with pytest.raises(ValueError, match=r"no reset_parameters\(\) initialises \(scale\)"):
        fullcp.RetrainedFullConformalRegressor(model, l2=1.0).conformalize(X, y)
    cp = fullcp.RetrainedFullConformalRegressor(model, l2=1.0, start="trained", epochs=3, candidates=3)
    assert cp.conformalize(X, y).predict_interval(points, 0.5).intervals.shape == (3, 2, 1)


def test_divergence_is_named():
    model, X, y, points = problem()
    cp = fullcp.RetrainedFullConformalRegressor(model, l2=1.0, candidates=3, learning_rate=(1e200, 1e200), epochs=5)
    with pytest.raises(ValueError, match="training diverged with the label"):
        cp.conformalize(X, y).predict_interval(points)


def test_a_label_that_diverges_costs_no_other(tmp_path, monkeypatch):
    """The others of its chunk are remembered and in the file; asked again, it alone is trained."""
    model, X, y, points = problem()
    labels = torch.tensor([0.0, 1e200, 0.5, 1.0], dtype=F64)
    trained = []
    genuine = retraining_module.Retraining._train
    monkeypatch.setattr(
        retraining_module.Retraining,
        "_train",
        lambda self, x, labels: (trained.append(len(x)), genuine(self, x, labels))[1],
    )
    arguments = {"checkpoint": tmp_path / "known", **RECIPE}
    for expected in ([12], [12, 3]):
        cp = fullcp.RetrainedFullConformalRegressor(model, candidates=labels, **arguments).conformalize(X, y)
        with pytest.raises(ValueError, match=r"training diverged with the label 1e\+200 added"):
            cp.predict_interval(points)
        assert trained == expected
    right = fullcp.RetrainedFullConformalRegressor(model, candidates=labels, **RECIPE).conformalize(X, y)
    for label in (0.0, 0.5, 1.0):
        assert torch.equal(cp.p_value(points, label), right.p_value(points, label))
    assert trained == [12, 3, 3, 3, 3]  # by the one without a file


def test_a_chunk_is_some_seconds_of_work(monkeypatch):
    """Progress and the file move with it; never fewer networks than fill a machine, nor more than fit into memory."""
    model, X, y, _ = problem()  # 15 rows, 21 weights

    def at_once(**changes):
        cp = fullcp.RetrainedFullConformalRegressor(model, **{"l2": 1.0, "epochs": 1000, **changes})
        return cp.conformalize(X, y)._retraining._at_once()

    assert at_once() == 512
    monkeypatch.setattr(retraining_module, "_WORK", 40 * 15 * 21 * 1000)
    assert at_once() == 40
    assert at_once(epochs=500) == 80
    assert at_once(epochs=10**6) == 16
    assert at_once(memory="1MB") == 40
    monkeypatch.setattr(retraining_module, "_WORK", 3e9)
    assert at_once(memory="1MB") < 500


def test_an_interruption_within_seconds_is_written_too(tmp_path, monkeypatch):
    model, X, y, points = problem()
    monkeypatch.setattr(retraining_module, "_MOST", {"cpu": 5})
    genuine = retraining_module.Retraining._train
    trained = []

    def stops(self, x, labels):
        if len(trained) == 3:
            raise KeyboardInterrupt
        trained.append(len(x))
        return genuine(self, x, labels)

    monkeypatch.setattr(retraining_module.Retraining, "_train", stops)
    arguments = {"candidates": 9, "checkpoint": tmp_path / "known", **RECIPE}
    for known in (15, 27):
        cp = fullcp.RetrainedFullConformalRegressor(model, **arguments).conformalize(X, y)
        if known == 15:
            with pytest.raises(KeyboardInterrupt):
                cp.predict_interval(points)
        else:
            assert len(cp._retraining._known) == 15
            trained.clear()
            cp.predict_interval(points)
            assert sum(trained) == 12


def test_rows_of_one_number_are_recognised():
    """NumPy gives a new axis a stride of 0."""
    x = torch.from_numpy(np.arange(3.0)[:, None])
    labels = torch.zeros(3, 2, dtype=F64)
    assert retraining_module._keys(x, labels) == retraining_module._keys(x.clone() + 0, labels)
    assert len(set(retraining_module._keys(x, labels))) == 3
