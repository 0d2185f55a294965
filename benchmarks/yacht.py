"""The yacht folds of the paper's main table, all trained as one ensemble: widths, coverage and seconds a fold.

    FULLCP_DATA=../shared/data python benchmarks/yacht.py --repeats 10

Network, schedule and tuning are the paper's: 6-50-1, 5,000 epochs, marginal likelihood every 50 epochs. Results go to
results/yacht_folds.json, beside the published figures.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import torch

import fullcp
from fullcp.data import Standardizer
from fullcp.training import mlp, replicate, train_ensemble

ROOT = Path(__file__).resolve().parent.parent
LEVELS = (0.9, 0.95, 0.99)
PUBLISHED = {"ACP-GN": [1.594, 2.385, 6.915], "LA": [1.690, 2.014, 2.647]}


def folds(rows, repeats):
    """Training and test rows of repeated 10-fold cross-validation."""
    for repeat in range(repeats):
        order = np.random.default_rng(repeat).permutation(rows)
        for test in np.array_split(order, 10):
            yield repeat, np.setdiff1d(order, test), test


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=5000)
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "yacht_folds.json")
    arguments = parser.parse_args()
    if "FULLCP_DATA" not in os.environ:
        sys.exit("set FULLCP_DATA to the folder that holds uci/yacht.txt")
    table = np.loadtxt(Path(os.environ["FULLCP_DATA"], "uci", "yacht.txt"))
    X, y = table[:, :-1], table[:, -1]
    warnings.simplefilter("ignore")
    parts = list(folds(len(X), arguments.repeats))
    scales = [(Standardizer.of(X[rows]), Standardizer.of(y[rows])) for _, rows, _ in parts]
    data = [(a.transform(X[rows]), b.transform(y[rows])) for (_, rows, _), (a, b) in zip(parts, scales, strict=True)]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    models = [model.to(device) for model in replicate(lambda: mlp(6), range(len(parts)))]
    wall, cpu = time.perf_counter(), time.process_time()
    runs = train_ensemble(models, data, l2="marglik", epochs=arguments.epochs)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    found = {name: [] for name in ("ACP-GN", "LA")}
    for (repeat, _, test), (a, b), (Z, t), model, run in zip(parts, scales, data, models, runs, strict=True):
        methods = {
            "ACP-GN": fullcp.FullConformalRegressor(model, l2=run.l2).conformalize(Z, t),
            "LA": fullcp.LaplaceRegressor(model, l2=run.l2, noise=run.noise).fit(Z, t),
        }
        for name, method in methods.items():
            result = method.predict_interval(a.transform(X[test]), LEVELS)
            label = b.transform(y[test])[:, None]
            inside = (label >= result.lower) & (label <= result.upper)
            found[name].append((repeat, (result.upper - result.lower).mean(0) * b.scale, inside.mean(0)))
    report = {
        "command": f"FULLCP_DATA=... python benchmarks/yacht.py --repeats {arguments.repeats}",
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT, check=False
        ).stdout.strip(),
        "machine": f"{platform.machine()}, torch {torch.__version__}, {torch.get_num_threads()} thread(s), {device}",
        "folds": len(parts),
        "seeds": f"splits {list(range(arguments.repeats))}, networks 0 to {len(parts) - 1}",
        "wall_s_per_fold": round(wall / len(parts), 2),
        "cpu_s_per_fold": round(cpu / len(parts), 2),
        "authors_cpu_s_per_fold": 120,
        "methods": {},
    }
    for name, rows in found.items():
        by_repeat = [
            [np.mean([row[k] for row in rows if row[0] == r], axis=0) for r in range(arguments.repeats)] for k in (1, 2)
        ]
        width, coverage = (np.array(values) for values in by_repeat)
        report["methods"][name] = {
            "levels": LEVELS,
            "width": width.mean(0).round(3).tolist(),
            "width_se": (width.std(0) / max(1, arguments.repeats - 1) ** 0.5).round(3).tolist(),
            "published_width": PUBLISHED[name],
            "coverage": coverage.mean(0).round(4).tolist(),
        }
    text = json.dumps(report, indent=2)
    print(text)
    arguments.output.parent.mkdir(exist_ok=True)
    arguments.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
