"""What intervals cost: the pruned engine beside the dense way and the formulas point by point, and how it grows.

    python benchmarks/prediction.py                    # all of it, some minutes on two cores
    python benchmarks/prediction.py --parts data       # data, whole_set, one_row, scaling, million
    FULLCP_DATA=../shared/data python benchmarks/prediction.py   # kin8nm and protein, not made rows of their sizes

- ours: `predict_interval`, from inputs to intervals, gradients of the test points and all.
- dense: gradients, whiten, multiply with all whitened rows (held in float64, made before the clock starts),
  changepoints, k-th values by partial sorting, in chunks of test points.
- formulas: H^-1 at hand, and for each test point cross leverages, changepoints and a full sort; timed for a few points.

All three give the same intervals. The bound is what no way around is known for: two triangular solves a test point and
the products with the rows that remain, at the measured rate of float64 products. Results go to results/.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
import time
import warnings
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
from measure import RESULTS, Anonymous, provenance, rate_of_products, seconds, synchronise

import fullcp
from fullcp.influence import absolute_changepoints, signed_changepoints
from fullcp.pruning import SortedRows
from fullcp.regions import absolute_rank, order_statistics, signed_ranks
from fullcp.training import mlp, train

LEVELS = (0.9, 0.95, 0.99)
SHAPES = {"kin8nm": (8192, 8, (50,), 1.0, 100), "protein": (45730, 9, (50, 50, 50), 10.0, 10)}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def rows_of(name):
    """Standardised rows of a data set, or made ones of its size."""
    N, inputs, *_ = SHAPES[name]
    folder = os.environ.get("FULLCP_DATA")
    if folder and name == "kin8nm":
        table = np.loadtxt(next(Path(folder, "uci").glob("kin8nm*")))
        X, y = table[:, :-1], table[:, -1]
    elif folder:
        with gzip.open(Path(folder, "uci", "CASP.csv.gz"), "rt") as file:
            table = np.loadtxt(file, delimiter=",", skiprows=1)
        X, y = table[:, 1:], table[:, 0]
    else:
        return made(N, inputs)
    order = np.random.default_rng(0).permutation(len(X))
    X, y = (X[order] - X.mean(0)) / X.std(0), (y[order] - y.mean()) / y.std()
    return torch.tensor(X, dtype=torch.float32), torch.tensor(y)


def made(N, inputs, seed=0):
    """Smooth labels with noise of heavy tails."""
    generator = np.random.default_rng(seed)
    X = generator.standard_normal((N, inputs), dtype=np.float32)
    y = np.sin(X[:, 0]) + 0.5 * X[:, 1] * X[:, 2] + 0.3 * generator.standard_t(4, size=N)
    return torch.from_numpy(X), torch.from_numpy((y - y.mean()) / y.std())


def touched(cp, X, levels):
    """The shares of the training rows and the products with them that the groups of test points take."""
    sizes, window = [], SortedRows.windows

    def watched(self, leverages, *arguments):
        for found in window(self, leverages, *arguments):
            sizes.append(len(found.rows))
            yield found

    SortedRows.windows = watched
    try:
        cp.predict_interval(X, levels)
    finally:
        SortedRows.windows = window
    return sizes


class Dense:
    """The best straightforward way: everything of training that can be had before is."""

    def __init__(self, cp):
        self.cp, self.engine, curvature = cp, cp._engine, cp.curvature_
        self.L, features = curvature.factor, curvature.features
        self.Z = torch.cat([curvature._whiten(phi).T for _, phi in features.chunks()])  # (N, D), whitened

    def intervals(self, X, levels, chunk=256):
        """Ends (m, 2, L)."""
        engine, parts = self.engine, []
        e, s, N = engine.e[:, 0], engine.slack[:, 0, 0], len(engine.e)
        signed = engine.residuals == "signed"
        ends = signed_changepoints if signed else absolute_changepoints
        levels = [Fraction(str(level)) for level in levels]
        high = [absolute_rank(level, N) for level in levels]
        ranks = [signed_ranks(level, N) for level in levels] if signed else [(N + 1 - k, k) for k in high]
        for x in torch.split(X, chunk):
            f, phi = self.cp.network_(x)
            z = torch.linalg.solve_triangular(self.L, phi[:, 0].double().T, upper=False)  # (D, m)
            lower, upper = ends(engine.score, e, s, z.T @ self.Z.T, z.square().sum(0))
            low = order_statistics(lower.clone() if lower is upper else lower, [a for a, _ in ranks])
            parts.append(f.double()[:, :, None] + torch.stack([low, order_statistics(upper, [b for _, b in ranks])], 1))
        return torch.cat(parts)


class Formulas:
    """One test point after the other, as the formulas stand in the paper (studentized scores)."""

    def __init__(self, cp):
        self.cp, self.engine = cp, cp._engine
        self.phi = torch.cat([phi[:, 0].double() for _, phi in cp.curvature_.features.chunks()])
        self.inverse = torch.cholesky_inverse(cp.curvature_.factor)

    def intervals(self, X, levels):
        """Ends (m, 2, L)."""
        e, h_i, N = self.engine.e[:, 0], 1 - self.engine.slack[:, 0, 0], len(self.phi)
        found = []
        for x in X:
            f, phi = self.cp.network_(x.unsqueeze(0))
            g = self.inverse @ phi[0, 0].double()
            h, c = phi[0, 0].double() @ g, self.phi @ g
            A, B = e / (1 - h_i + c**2 / (1 + h)).sqrt(), c / ((1 - h_i + c**2 / (1 + h)).sqrt() * (1 + h))
            b = 1 / (1 + h).sqrt()
            if self.engine.residuals == "signed":
                r = (A / (b + B)).sort().values
                pairs = [signed_ranks(Fraction(str(level)), N) for level in levels]
                ends = [[r[low - 1] for low, _ in pairs], [r[high - 1] for _, high in pairs]]
            else:
                left, right = (A.abs() / (b - A.sign() * B)).sort().values, (A.abs() / (b + A.sign() * B)).sort().values
                ranks = [absolute_rank(Fraction(str(level)), N) for level in levels]
                ends = [[-left[k - 1] for k in ranks], [right[k - 1] for k in ranks]]
            found.append(f.double()[0, 0] + torch.tensor(ends, dtype=torch.float64))
        return torch.stack(found)


def fitted(X, y, N, hidden, l2, epochs, residuals, memory):
    """A trained network with its curvature."""
    torch.manual_seed(0)
    model = mlp(X.shape[1], hidden).to(DEVICE)
    some = slice(0, min(N, 50_000))
    train(model, X[some], y[some], l2=l2 * min(1.0, 50_000 / N), epochs=epochs)
    cp = fullcp.FullConformalRegressor(model, "full", "studentized", residuals, l2, memory=memory)
    return cp, seconds(lambda: cp.conformalize(X[:N], y[:N]))


def data_part(arguments):
    """Ours, dense and formulas on two sets."""
    rate, rows = rate_of_products(DEVICE), []
    for name, (total, _, hidden, l2, epochs) in SHAPES.items():
        X, y = (t.to(DEVICE) for t in rows_of(name))
        N = int(0.9 * total)
        for residuals in ("signed", "absolute"):
            cp, fit = fitted(X, y, N, hidden, l2, epochs, residuals, "4GB")
            X_new = X[N : N + (1000 if name == "protein" else total - N)]
            dense, D, m = Dense(cp), cp.network_.size, len(X_new)
            ways = {
                "ours": lambda cp=cp, X_new=X_new: cp.predict_interval(X_new, LEVELS).intervals,
                "dense": lambda dense=dense, X_new=X_new: dense.intervals(X_new, LEVELS),
            }
            answers = {way: function() for way, function in ways.items()}
            gap = float((answers["ours"] - answers["dense"]).abs().max())
            times = {way: [] for way in ways}
            for _ in range(arguments.rounds):  # in turn: the machine is not the same from one minute to the next
                for way, function in ways.items():
                    times[way].append(seconds(function))
            least = {way: min(values) for way, values in times.items()}
            row = {"set": name, "N": N, "D": D, "points": m, "levels": len(LEVELS), "residuals": residuals,
                   "fit_s": round(fit, 3)}  # fmt: skip
            row |= {f"{way}_s": round(least[way], 4) for way in ways}
            row["times_faster_than_dense"] = round(
                float(np.median([b / a for a, b in zip(times["ours"], times["dense"], strict=True)])), 2
            )
            del dense, ways
            if DEVICE.type == "cpu":
                formulas, few = Formulas(cp), X_new[:20]
                found = formulas.intervals(few, LEVELS)
                gap = max(gap, float((found - answers["ours"][:20]).abs().max()))
                row["formulas_s"] = round(seconds(lambda f=formulas, few=few: f.intervals(few, LEVELS)) * m / 20, 2)
                row["times_faster_than_formulas"] = round(row["formulas_s"] / least["ours"], 1)
                del formulas
            sizes = touched(cp, X_new, LEVELS)
            row["rows_touched"] = round(float(np.mean(sizes)) / N, 4)
            bound = (2 * m * D**2 + sum(2 * (m / len(sizes)) * S * D for S in sizes)) / rate
            row["share_of_bound"] = round(bound / least["ours"], 3)
            with Anonymous() as memory:
                cp.predict_interval(X_new, LEVELS)
            row["peak_mb"] = round(memory.above / 1e6)
            row["largest_difference"] = gap
            print(row, flush=True)
            rows.append(row)
    return {"gflops_of_products": round(rate / 1e9), "sets": rows}


def whole_set_part(arguments):
    """Protein: the fit and all of its test rows, after a first round that warms up."""
    _, _, hidden, l2, epochs = SHAPES["protein"]
    X, y = (t.to(DEVICE) for t in rows_of("protein"))
    N, found = int(0.9 * len(X)), {}
    for residuals in ("signed", "absolute"):
        cp, _ = fitted(X, y, N, hidden, l2, epochs, residuals, "8GB")
        cp.predict_interval(X[N:], LEVELS)
        steps = (lambda cp=cp: cp.conformalize(X[:N], y[:N])), (lambda cp=cp: cp.predict_interval(X[N:], LEVELS))
        fit, predict = min((tuple(seconds(step) for step in steps) for _ in range(arguments.rounds)), key=sum)
        found[residuals] = {"fit_s": round(fit, 4), "predict_s": round(predict, 4)}
    return {"N": N, "D": cp.network_.size, "points": len(X) - N, "levels": len(LEVELS), **found}


def one_row_part(arguments):
    """The latency of a single row."""
    X, y = (t.to(DEVICE) for t in made(10_400, 8))
    cp, _ = fitted(X, y, 10_000, (50,), 5.0, 20, "auto", "2GB")
    rows = X[10_000:].cpu().numpy() if DEVICE.type == "cpu" else X[10_000:]
    times = [seconds(lambda i=i: cp.predict_interval(rows[i : i + 1], 0.9)) for i in range(400)]
    return {"N": 10_000, "D": cp.network_.size, "median_ms": round(1e3 * float(np.median(times[50:])), 2)}


def scaling_part(arguments):
    """Milliseconds a test point, in groups of 1,000, against N, D and their number."""
    largest = arguments.largest
    found = {"N": [], "D": [], "points": []}

    def measure(axis, value, N, width, m):
        X, y = (t.to(DEVICE) for t in made(N + m, 8))
        cp, fit = fitted(X, y, N, (width,), 5.0, 3, "signed", "5GB")
        cp.predict_interval(X[N : N + 10], LEVELS)
        best = min(seconds(lambda: cp.predict_interval(X[N:], LEVELS)) for _ in range(arguments.rounds))
        sizes = touched(cp, X[N:], LEVELS)
        row = {axis: value, "fit_s": round(fit, 3), "ms_per_point": round(1e3 * best / m, 4),
               "rows_touched": round(float(np.mean(sizes)))}  # fmt: skip
        print({"N": N, "D": cp.network_.size, "points": m} | row, flush=True)
        found[axis].append(row)

    N = 10_000
    while largest >= N:
        measure("N", N, N, 50, 1000)
        N = 2 * N if N != 640_000 else 1_000_000
    for width in (12, 25, 50, 100, 200):
        measure("D", 10 * width + 1, 40_000, width, 1000)
    for m in (1, 10, 100, 1000, 10_000):
        measure("points", m, 40_000, 50, m)
    return found


def million_part(arguments):
    """A million rows and 10,000 test points, in a process of its own."""
    if not arguments.inside:
        command = [sys.executable, __file__, "--parts", "million", "--inside"]
        return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    N, m = 1_000_000, 10_000
    X, y = (t.to(DEVICE) for t in made(N + m, 8))
    torch.manual_seed(0)
    model = mlp(8, (50,)).to(DEVICE)
    train(model, X[:50_000], y[:50_000], l2=0.25, epochs=10)
    cp = fullcp.FullConformalRegressor(model, "full", l2=5.0, memory="4.1GB")
    with Anonymous() as memory:
        start = time.perf_counter()
        cp.conformalize(X[:N], y[:N])
        synchronise()
        fit = time.perf_counter() - start
        result = cp.predict_interval(X[N:], LEVELS)
        synchronise()
        predict = time.perf_counter() - start - fit
    label = y[N:].unsqueeze(1)
    coverage = ((label >= result.lower) & (label <= result.upper)).double().mean(0)
    return {
        "N": N,
        "D": cp.network_.size,
        "points": m,
        "fit_s": round(fit, 2),
        "predict_s": round(predict, 2),
        "peak_gb_of_the_process": round(memory.most / 1e9, 2),
        "coverage": [round(c, 4) for c in coverage.tolist()],
    }


PARTS = {
    "data": data_part,
    "whole_set": whole_set_part,
    "one_row": one_row_part,
    "scaling": scaling_part,
    "million": million_part,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = [part for part in PARTS if part != "whole_set" or DEVICE.type == "cuda"]  # some minutes of fits on a CPU
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=usual)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--largest", type=int, default=1_000_000, help="rows in the scaling part")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, default=RESULTS / f"benchmark_prediction_{DEVICE.type}.json")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if arguments.inside:
        print(json.dumps(million_part(arguments)))
        return
    report = json.loads(arguments.output.read_text()) if arguments.output.exists() else {}
    for part in arguments.parts:
        report[part] = {**provenance(), **PARTS[part](arguments)}
        print(json.dumps({part: report[part]}, indent=1), flush=True)
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
