"""What fitting a curvature costs: seconds beside the matrix products it cannot avoid, and peak memory.

    python benchmarks/curvature.py                 # protein-sized: N = 41,157, three hidden layers of 50, D = 5,651
    python benchmarks/curvature.py --rows 5000     # smaller

The bound is the triangle of the Gram product and the triangular solve of all rows, N D^2 multiply-adds in all, timed in
the same process at the measured rate of matrix products. Peaks are of a process of their own, above what it had before:
of the fit, of all of `conformalize`, and of that with intervals of 100 points. They are divided by what is held at the
end: the tensors of the curvature, and gradients of training rows where they were formed (by KFAC for intervals alone).
Results go to results/benchmark_curvature.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import torch

import fullcp
from fullcp.curvature import choose, fit_curvature
from fullcp.features import FeatureRows
from fullcp.training import mlp

ROOT = Path(__file__).resolve().parent.parent
STRUCTURES = ("full", "kfac", "last_layer", "diagonal")


def synchronise():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(function):
    synchronise()
    start = time.perf_counter()
    function()
    synchronise()
    return time.perf_counter() - start


def rows_for(structure, rows, device, memory):
    """A protein-sized problem: the gradients of a fresh network."""
    torch.manual_seed(0)
    model = mlp(9, (50, 50, 50)).to(device)
    X = torch.randn(rows, 9, device=device)
    return FeatureRows(choose(structure, model, X, memory=memory).jacobian, X, memory=memory)


def fit(structure, rows, device="cpu", memory=2 * 10**9):
    """Curvature and the leverages of all rows, from the network on."""
    features = rows_for(structure, rows, device, memory)
    curvature = fit_curvature(features, structure, 1.0)
    curvature.slack()
    return curvature


def bound(rows, size, device):
    """Seconds that the unavoidable products take: chunks of Gram products and solves, at half their square cost."""
    chunk = min(rows, 4096)
    P = torch.randn(chunk, size, dtype=torch.float64, device=device)
    S = torch.empty(size, size, dtype=torch.float64, device=device)
    L = torch.eye(size, dtype=torch.float64, device=device)
    L += 1e-3 * torch.randn_like(L).tril(-1)
    product = min(seconds(lambda: torch.mm(P.T, P, out=S)) for _ in range(3))
    solve = min(seconds(lambda: torch.linalg.solve_triangular(L, P.T, upper=False)) for _ in range(3))
    return (product / 2 + solve) * rows / chunk, 2 * chunk * size**2 / product / 1e9, solve / product


class Anonymous(threading.Thread):
    """The most memory that is not of a file, sampled every few milliseconds."""

    def __init__(self):
        super().__init__(daemon=True)
        self.most, self.running = 0, True

    def run(self):
        """Sample until told to stop."""
        while self.running:
            self.most = max(self.most, anonymous())
            time.sleep(0.002)


def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def held(curvature):
    """Bytes of the gradients of training rows, where they are held, and of the tensors of the curvature."""
    phi = curvature.features._held
    factors = sum(t.numel() * t.element_size() for t in curvature.state().values())
    return {"kept_features": 0 if phi is None else phi.numel() * phi.element_size(), "factor": factors}


def predict(structure, rows, points=100):
    """Intervals for some points, with `conformalize` before."""
    return conformalize(structure, rows, points)


def conformalize(structure, rows, points=0):
    """The whole of it, with l2 given: curvature, residuals, leverages, and how far the network is from its minimum."""
    torch.manual_seed(0)
    model, X = mlp(9, (50, 50, 50)), torch.randn(rows, 9)
    with torch.no_grad():
        y = model(X)[:, 0] + 0.1 * torch.randn(rows)
    cp = fullcp.FullConformalRegressor(model, structure, l2=1.0).conformalize(X, y)
    if points:
        cp.predict_interval(torch.randn(points, 9), 0.9)
    return cp.curvature_


PARTS = {"fit": fit, "conformalize": conformalize, "predict": predict}


def peak(structure, rows, function):
    """Bytes above what was there before, with what is kept: run in a process of its own."""
    function(structure, 300)
    watcher, before = Anonymous(), anonymous()
    watcher.start()
    start = time.perf_counter()
    curvature = function(structure, rows)
    watcher.running = False
    return {"seconds": round(time.perf_counter() - start, 3), "peak": watcher.most - before, **held(curvature)}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=41157)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peak-of", choices=STRUCTURES, help="print the peak of one structure, and no more")
    parser.add_argument("--part", choices=PARTS, default="fit", help="with --peak-of: of what")
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "benchmark_curvature.json")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if arguments.peak_of:
        print(json.dumps(peak(arguments.peak_of, arguments.rows, PARTS[arguments.part])))
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    fit("full", 500, device)
    rounds = {name: [] for name in (*STRUCTURES, "bound")}
    for _ in range(arguments.rounds):  # in turn: the machine is not the same from one minute to the next
        for name in STRUCTURES:
            rounds[name].append(seconds(lambda name=name: fit(name, arguments.rows, device)))
        least, rate, ratio = bound(arguments.rows, 5651, device)
        rounds["bound"].append(least)
    report = {
        "command": "python benchmarks/curvature.py " + " ".join(sys.argv[1:]),
        "commit": subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT,
                                 check=False).stdout.strip(),
        "machine": f"{platform.processor() or platform.machine()}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} thread(s)" + (f", {torch.cuda.get_device_name()}" if device.type == "cuda" else ""),
        "rows": arguments.rows,
        "parameters": 5651,
        "seconds_fit_and_leverages": {name: round(min(values), 3) for name, values in rounds.items()},
        "full_times_bound": round(min(a / b for a, b in zip(rounds["full"], rounds["bound"], strict=True)), 2),
        "gflops_of_products": round(rate),
        "solve_times_product": round(ratio, 2),
        "peak_gb_of_the_process": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2),
    }  # fmt: skip
    if device.type == "cpu":
        for part in PARTS:
            key = "memory" if part == "fit" else f"memory_{part}"
            report[key] = {}
            for name in ("full", "kfac"):
                command = [sys.executable, __file__, "--peak-of", name, "--rows", str(arguments.rows), "--part", part]
                found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
                kept = found["kept_features"] + found["factor"]
                found["peak_times_kept"] = round(found["peak"] / kept, 2)
                found["peak_times_budget"] = round(found["peak"] / 2e9, 3)
                report[key][name] = found
    text = json.dumps(report, indent=2)
    print(text)
    arguments.output.parent.mkdir(exist_ok=True)
    arguments.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
