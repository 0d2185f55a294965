"""How fast networks train together: against plain torch, against `train` one by one, and against the matrix products.

    python benchmarks/training.py             # about three minutes on two cores
    python benchmarks/training.py --threads 2 # the default takes what torch takes

Everything is measured in one process, the ways in turn, the best of several rounds of each. Results go to
results/benchmark_training.json.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import subprocess
import sys
import time
import warnings
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

import fullcp
from fullcp.training import Schedule, mlp, replicate, train, train_ensemble

ROOT = Path(__file__).resolve().parent.parent


def best_of(rounds, function):
    """Seconds of the fastest round."""
    times = []
    for _ in range(rounds):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times)


def plain_step(model, X, y, l2):
    """One step as everybody writes it."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step():
        optimizer.zero_grad()
        loss = (model(X)[:, 0] - y).square().mean() / 2
        penalty = sum(p.square().sum() for p in model.parameters()) * l2 / len(X) / 2
        (loss + penalty).backward()
        optimizer.step()

    return step


def step_of_many(networks, hidden, inputs, device, rounds=3, rows=256, shared=True):
    """Microseconds of one step of all networks at batch 256: together, one by one with `train`, and in plain torch.

    With 256 shared rows an epoch is one step, and its rows need no order. Where each network has rows of its own, and
    several batches of them, the time of a step holds its share of the shuffling, too.
    """
    steps = rows // 256
    epochs = (400 if device.type == "cuda" else 40) // steps
    pairs = []
    for _ in range(1 if shared else networks):
        X = torch.randn(rows, inputs, device=device)
        pairs.append((X, X.sum(1) + 0.1 * torch.randn(rows, device=device)))
    X, y = (part[:256] for part in pairs[0])
    data = pairs[0] if shared else pairs
    models = [model.to(device) for model in replicate(lambda: mlp(inputs, hidden), range(networks))]
    train_ensemble(copy.deepcopy(models), data, epochs=5)
    ready = [copy.deepcopy(models) for _ in range(rounds)]
    few, many = (best_of(rounds, lambda n=n: train_ensemble(copy.deepcopy(models), data, epochs=n))
                 for n in (epochs, 6 * epochs))  # fmt: skip
    together = (many - few) / (5 * epochs * steps)
    single = copy.deepcopy(models[0])
    few, many = (best_of(rounds, lambda n=n: train(single, *pairs[0], epochs=n)) for n in (epochs, 6 * epochs))
    alone = (many - few) / (5 * epochs * steps)
    step = plain_step(ready[0][0], X, y, 1.0)
    plain = best_of(rounds, lambda: [step() for _ in range(epochs)]) / epochs
    widths = [inputs, *hidden, 1]
    products = sum(a * b for a, b in pairwise(widths)) * 3 - widths[0] * widths[1]
    a = torch.randn(networks, 256, hidden[0], device=device)
    W = torch.randn(networks, hidden[0], hidden[0], device=device)
    out = torch.empty_like(a)
    gemm = best_of(5, lambda: [torch.bmm(a, W, out=out) for _ in range(10)]) / 10
    bound = gemm * products / hidden[0] ** 2
    return {
        "networks": networks,
        "shape": "-".join(map(str, widths)),
        "rows": rows,
        "rows_of_each_network_its_own": not shared,
        "device": str(device),
        "ensemble_us_per_step": round(together * 1e6, 1),
        "train_us_per_step": round(alone * 1e6, 1),
        "plain_torch_us_per_step": round(plain * 1e6, 1),
        "times_faster_than_plain_torch_in_a_loop": round(plain * networks / together, 1),
        "times_faster_than_train_in_a_loop": round(alone * networks / together, 1),
        "bound_us_matrix_products_alone": round(bound * 1e6, 1),
        "share_of_bound": round(bound / together, 3),
    }


def folds(count, device):
    """Seconds a fold of a yacht-sized problem at the paper's settings, tuned during training."""
    X = torch.randn(277, 6, device=device)
    y = torch.sin(X.sum(1)) + 0.1 * torch.randn(277, device=device)
    models = [model.to(device) for model in replicate(lambda: mlp(6), range(count))]
    start, cpu = time.perf_counter(), time.process_time()
    train_ensemble(models, [(X, y)] * count, l2="marglik", epochs=5000, tuning=Schedule())
    wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    return {"folds": count, "wall_s_per_fold": round(wall / count, 2), "cpu_s_per_fold": round(cpu / count, 2)}


def retrainings(points, device):
    """Seconds of exact full conformal prediction at the paper's synthetic settings, for some of its 100 test points."""
    X = torch.randn(500 + points, 1, device=device)
    y = torch.sin(2 * X[:, 0]) + 0.1 * torch.randn(500 + points, device=device)
    model = mlp(1, (100,), activation=nn.Tanh).to(device)
    train(model, X[:500], y[:500], l2=0.05, epochs=50)
    cp = fullcp.RetrainedFullConformalRegressor(model, "signed", l2=0.05, candidates=50)
    cp.conformalize(X[:500], y[:500])
    seconds = best_of(1, lambda: cp.predict_interval(X[500:], [0.9, 0.95, 0.99]))
    return {
        "points": points,
        "trainings": 50 * points,
        "s": round(seconds, 2),
        "s_for_100_points": seconds * 100 / points,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "benchmark_training.json")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    warnings.simplefilter("ignore")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    steps = [step_of_many(100, (50,), 6, device), step_of_many(20, (50, 50, 50), 9, device)]
    if device.type == "cuda":
        steps.append(step_of_many(140, (50, 50, 50), 9, device))
    deep = 140 if device.type == "cuda" else 20
    steps.append(step_of_many(100, (50,), 6, device, rows=512, shared=False))
    steps.append(step_of_many(deep, (50, 50, 50), 9, device, rows=512, shared=False))
    report = {
        "command": "python benchmarks/training.py " + " ".join(sys.argv[1:]),
        "commit": subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT,
                                 check=False).stdout.strip(),
        "machine": f"{platform.processor() or platform.machine()}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} thread(s)" + (f", {torch.cuda.get_device_name()}" if device.type == "cuda" else ""),
        "steps": steps,
        "online_tuning": folds(10, device),
        "full_conformal": retrainings(100 if device.type == "cuda" else 1, device),
    }  # fmt: skip
    text = json.dumps(report, indent=2)
    print(text)
    arguments.output.parent.mkdir(exist_ok=True)
    arguments.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
