"""Training on a GPU: the same networks as on the CPU, from recorded steps."""

from __future__ import annotations

import copy
import time
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import fullcp
from fullcp.training import DivergenceWarning, Schedule, graphs, mlp, replicate, train_ensemble

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def data(rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(rows, 3, generator=generator, dtype=torch.float64)
    return X, torch.sin(X.sum(1)) + 0.1 * torch.randn(rows, generator=generator, dtype=torch.float64)


def on_both(make, pairs, **recipe):
    """Networks and results of the same training on CPU and GPU."""
    found = []
    for device in ("cpu", "cuda"):
        models = [model.to(device) for model in replicate(make, range(len(pairs)))]
        runs = train_ensemble(models, [tuple(t.to(device) for t in pair) for pair in pairs], **recipe)
        weights = [torch.cat([p.detach().reshape(-1) for p in model.parameters()]).cpu() for model in models]
        found.append((torch.stack(weights), runs))
    return found


@pytest.mark.parametrize("batch_size", [16, 100])
def test_chains(batch_size, monkeypatch):
    replays = []
    genuine = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda self: (replays.append(1), genuine(self))[1])
    pairs = [data(n, seed=n) for n in (60, 43, 33)]
    (cpu, runs), (gpu, gpu_runs) = on_both(lambda: mlp(3, (8,)).double(), pairs, epochs=30, batch_size=batch_size)
    torch.testing.assert_close(cpu, gpu, atol=1e-9, rtol=1e-7)
    for a, b in zip(runs, gpu_runs):
        np.testing.assert_allclose(a.losses, b.losses, rtol=1e-8)
    assert len(replays) >= 30 - graphs._WARM_UPS


def test_other_modules_tuning_and_early_stopping():
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mlp(3, (8,))

        def forward(self, x):
            return self.inner(x)

    pairs = [data(n, seed=n) for n in (60, 43)]
    schedule = Schedule(burn_in=10, every=10, steps=5)
    for make in (lambda: mlp(3, (8,)).double(), lambda: Wrapped().double()):
        (_, cpu), (_, gpu) = on_both(make, pairs, epochs=40, l2="marglik", tuning=schedule)
        for a, b in zip(cpu, gpu):
            np.testing.assert_allclose(a.l2, b.l2, rtol=1e-6)
    held = tuple(t.cuda() for t in data(50, seed=9))
    models = [model.cuda() for model in replicate(lambda: mlp(3, (30,)).double(), range(2))]
    runs = train_ensemble(
        models, [tuple(t.cuda() for t in pair) for pair in pairs], epochs=300, l2=0.0, validation=held, patience=10
    )
    assert all(run.epochs == min(300, run.best_epoch + 10) for run in runs)


def test_divergence_and_retraining():
    pairs = [tuple(t.cuda() for t in data(20, seed=b)) for b in range(3)]
    wild = [pairs[0], tuple(1e200 * t for t in pairs[1]), pairs[2]]
    models = [model.cuda() for model in replicate(lambda: mlp(3, (4,)).double(), range(3))]
    with pytest.warns(DivergenceWarning, match="network 1"):
        runs = train_ensemble(models, wild, epochs=60)
    assert runs[1].divergence.epoch == 0
    ends = []
    model = mlp(3, (5,), activation=nn.Tanh).double()
    for device in ("cpu", "cuda"):
        X, y = (t.to(device) for t in data(20))
        cp = fullcp.RetrainedFullConformalRegressor(copy.deepcopy(model).to(device), l2=1.0, epochs=50, candidates=9)
        ends.append(cp.conformalize(X, y).predict_interval(X[:4] + 0.1, [0.5, 0.8]).intervals.cpu())
    torch.testing.assert_close(*ends)


def test_steps_are_as_fast_as_they_should_be():
    """On an H200: 120 microseconds a step for 100 networks 6-50-1, 350 for 140 networks 9-50-50-50-1."""
    if "H200" not in torch.cuda.get_device_name():
        pytest.skip("the bounds are those of an H200")
    for count, hidden, inputs, most in ((100, (50,), 6, 120e-6), (140, (50, 50, 50), 9, 350e-6)):
        X = torch.randn(256, inputs, device="cuda")
        models = [model.cuda() for model in replicate(partial(mlp, inputs, hidden), range(count))]
        seconds = []
        for epochs in (200, 2200):
            torch.cuda.synchronize()
            start = time.perf_counter()
            train_ensemble(models, (X, X.sum(1)), epochs=epochs)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        assert (seconds[1] - seconds[0]) / 2000 < most
