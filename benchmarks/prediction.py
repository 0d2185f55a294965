"""What intervals cost: the pruned engine beside the dense way and the formulas point by point, and how it grows.

    python benchmarks/prediction.py                    # all of it, some minutes on two cores
    python benchmarks/prediction.py --parts data       # data, p_values, whole_set, one_row, scaling, million
    FULLCP_DATA=../shared/data python benchmarks/prediction.py   # kin8nm and protein, not made rows of their sizes

The ways are those of benchmarks/ways.py: ours, from inputs to intervals, gradients of the test points and all; dense,
whose whitened rows are made before the clock starts; formulas, timed for a few points. `rows` says whether a row is
about the data set ("uci") or made rows of its size ("made").

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
from functools import partial
from pathlib import Path

import numpy as np
import torch
from measure import RESULTS, Anonymous, provenance, rate_of_products, seconds, synchronise
from ways import DEVICE, Dense, Formulas, peaks

import fullcp
from fullcp.pruning import SortedRows
from fullcp.report import print_table
from fullcp.training import mlp, train

LEVELS = (0.9, 0.95, 0.99)
SHAPES = {"kin8nm": (8192, 8, (50,), 1.0, 100), "protein": (45730, 9, (50, 50, 50), 10.0, 10)}
ABOUT = ("command", "commit", "machine")
MILLION_MEMORY = "4.1GB"


def rows_of(name):
    """Standardised rows of a data set, or made ones of its size, and which: "uci" or "made"."""
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
        return *made(N, inputs), "made"
    order = np.random.default_rng(0).permutation(len(X))
    X, y = (X[order] - X.mean(0)) / X.std(0), (y[order] - y.mean()) / y.std()
    return torch.tensor(X, dtype=torch.float32).to(DEVICE), torch.tensor(y).to(DEVICE), "uci"


def made(N, inputs, seed=0):
    """Smooth labels with noise of heavy tails."""
    generator = np.random.default_rng(seed)
    X = generator.standard_normal((N, inputs), dtype=np.float32)
    y = np.sin(X[:, 0]) + 0.5 * X[:, 1] * X[:, 2] + 0.3 * generator.standard_t(4, size=N)
    return torch.from_numpy(X).to(DEVICE), torch.from_numpy((y - y.mean()) / y.std()).to(DEVICE)


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
    for name in arguments.sets:
        total, _, hidden, l2, epochs = SHAPES[name]
        X, y, origin = rows_of(name)
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
            least, faster = in_turn(ways, arguments.rounds)
            row = {"set": name, "rows": origin, "N": N, "D": D, "points": m, "levels": len(LEVELS),
                   "residuals": residuals, "fit_s": round(fit, 3)}  # fmt: skip
            row |= {f"{way}_s": round(least[way], 4) for way in ways}
            row["times_faster_than_dense"] = faster
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
            kinds = ("ours", "dense", "formulas") if DEVICE.type == "cpu" else ("ours", "dense")
            row |= {f"{way}_peak_mb": mb for way, mb in peaks(cp, X_new, LEVELS, hidden, kinds).items()}
            row["largest_difference"] = gap
            print(row, file=sys.stderr, flush=True)
            rows.append(row)
    return {"gflops_of_products": round(rate / 1e9), "sets": rows}


def in_turn(ways, rounds):
    """Least seconds of each way, and how many times faster ours is than the dense one in the median round."""
    times = {way: [] for way in ways}
    for _ in range(rounds):  # in turn: the machine is not the same from one minute to the next
        for way, function in ways.items():
            times[way].append(seconds(function))
    ratios = [b / a for a, b in zip(times["ours"], times["dense"], strict=True)]
    return {way: min(values) for way, values in times.items()}, round(float(np.median(ratios)), 2)


def p_values_part(arguments):
    """P-values of the test rows' own labels: beside the dense way, and how they grow with N."""
    X, y, origin = rows_of("kin8nm")
    total, _, hidden, l2, epochs = SHAPES["kin8nm"]
    N, sets, growing = int(0.9 * total), [], []
    for residuals in ("signed", "absolute"):
        cp, _ = fitted(X, y, N, hidden, l2, epochs, residuals, "4GB")
        dense, m = Dense(cp), total - N
        ways = {"ours": partial(cp.p_value, X[N:], y[N:]), "dense": partial(dense.p_values, X[N:], y[N:])}
        differ = int((ways["ours"]() != ways["dense"]()).sum())
        least, faster = in_turn(ways, arguments.rounds)
        sets.append({"set": "kin8nm", "rows": origin, "N": N, "D": cp.network_.size, "points": m,
                     "residuals": residuals, **{f"{way}_s": round(least[way], 4) for way in ways},
                     "times_faster_than_dense": faster, "that_differ": differ})  # fmt: skip
    N, m = 10_000, 1000
    while min(arguments.largest, 640_000) >= N:
        X, y = made(N + m, 8)
        row = {"N": N}
        for residuals in ("signed", "absolute"):
            cp, _ = fitted(X, y, N, (50,), 5.0, 3, residuals, "5GB")
            cp.p_value(X[N : N + 10], y[N : N + 10])
            ask = partial(cp.p_value, X[N:], y[N:])
            best = min(seconds(ask) for _ in range(arguments.rounds))
            row[f"{residuals}_ms_per_point"] = round(1e3 * best / m, 4)
        print(row, file=sys.stderr, flush=True)
        growing.append(row)
        N *= 2
    return {"sets": sets, "N": growing, "D": cp.network_.size, "points": m}


def whole_set_part(arguments):
    """Protein: the fit and all of its test rows, after a first round that warms up."""
    _, _, hidden, l2, epochs = SHAPES["protein"]
    X, y, origin = rows_of("protein")
    N, found = int(0.9 * len(X)), {}
    for residuals in ("signed", "absolute"):
        cp, _ = fitted(X, y, N, hidden, l2, epochs, residuals, "8GB")
        cp.predict_interval(X[N:], LEVELS)
        steps = (lambda cp=cp: cp.conformalize(X[:N], y[:N])), (lambda cp=cp: cp.predict_interval(X[N:], LEVELS))
        fit, predict = min((tuple(seconds(step) for step in steps) for _ in range(arguments.rounds)), key=sum)
        found[residuals] = {"fit_s": round(fit, 4), "predict_s": round(predict, 4)}
    about = {"rows": origin, "N": N, "D": cp.network_.size, "points": len(X) - N, "levels": len(LEVELS)}
    return {**about, **found}


def one_row_part(arguments):
    """The latency of a single row."""
    X, y = made(10_400, 8)
    cp, _ = fitted(X, y, 10_000, (50,), 5.0, 20, "auto", "2GB")
    rows = X[10_000:].cpu().numpy() if DEVICE.type == "cpu" else X[10_000:]
    times = [seconds(lambda i=i: cp.predict_interval(rows[i : i + 1], 0.9)) for i in range(400)]
    return {"N": 10_000, "D": cp.network_.size, "median_ms": round(1e3 * float(np.median(times[50:])), 2)}


def scaling_part(arguments):
    """Milliseconds a test point, in groups of 1,000, against N, D and their number."""
    largest = arguments.largest
    found = {"N": [], "D": [], "points": []}

    def measure(axis, value, N, width, m):
        X, y = made(N + m, 8)
        cp, fit = fitted(X, y, N, (width,), 5.0, 3, "signed", "5GB")
        cp.predict_interval(X[N : N + 10], LEVELS)
        best = min(seconds(lambda: cp.predict_interval(X[N:], LEVELS)) for _ in range(arguments.rounds))
        sizes = touched(cp, X[N:], LEVELS)
        row = {axis: value, "fit_s": round(fit, 3), "ms_per_point": round(1e3 * best / m, 4),
               "rows_touched": round(float(np.mean(sizes)))}  # fmt: skip
        print({"N": N, "D": cp.network_.size, "points": m} | row, file=sys.stderr, flush=True)
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
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)  # progress goes to stderr
        return json.loads(done.stdout)
    N, m = 1_000_000, 10_000
    X, y = made(N + m, 8)
    torch.manual_seed(0)
    model = mlp(8, (50,)).to(DEVICE)
    train(model, X[:50_000], y[:50_000], l2=0.25, epochs=10)
    cp = fullcp.FullConformalRegressor(model, "full", l2=5.0, memory=MILLION_MEMORY)
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
        "memory": MILLION_MEMORY,
        "fit_s": round(fit, 2),
        "predict_s": round(predict, 2),
        "peak_gb_of_the_process": round(memory.most / 1e9, 2),
        "coverage": [round(c, 4) for c in coverage.tolist()],
    }


PARTS = {
    "data": data_part,
    "p_values": p_values_part,
    "whole_set": whole_set_part,
    "one_row": one_row_part,
    "scaling": scaling_part,
    "million": million_part,
}


def show(part, found):
    """Tables of what a part found: one of each list of rows, and one of its single numbers."""
    tables = {
        name: rows for name, rows in found.items() if isinstance(rows, list) and rows and isinstance(rows[0], dict)
    }
    if not tables:
        tables = {"": [{name: value for name, value in found.items() if name not in ABOUT}]}
    for name, rows in tables.items():
        cells = [[row[column] for row in rows] for column in rows[0]]
        table = [[column, *map(str, values)] for column, values in zip(rows[0], cells, strict=True)]
        print_table(f"{part} {name}".strip(), ["", *map(str, range(1, len(rows) + 1))], table)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = [part for part in PARTS if part != "whole_set" or DEVICE.type == "cuda"]  # some minutes of fits on a CPU
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=usual)
    parser.add_argument("--sets", nargs="+", choices=SHAPES, default=list(SHAPES), help="in the data part")
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
        show(part, report[part])
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
