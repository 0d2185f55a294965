"""Width and coverage against the share of rows that calibrate: the informed split beside the other guaranteed methods.

    FULLCP_DATA=../shared/data python benchmarks/informed.py yacht boston energy concrete --splits 20 --cv-plus
    FULLCP_DATA=../shared/data python benchmarks/informed.py bike --splits 10 --epochs 1000 --l2 1 --brief

Random 90/10 splits. In each, networks are trained on all training rows and on what each calibration share leaves; those
of all splits and shares are one ensemble, l2 tuned by the marginal likelihood while they train, as in the paper. The
first share is the one that `calibration_share(N, 0.9)` proposes. Results go to results/informed_split.csv, a row a set,
method, share and level, and stay there for sets that are not run again. The picture: `python benchmarks/informed.py
--picture docs/images/informed_split.png`, no training.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import shlex
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import torch

import fullcp
from fullcp.data import Standardizer, halves, load_dataset, random_splits
from fullcp.evaluation import evaluate
from fullcp.plots import width_against_share
from fullcp.progress import track
from fullcp.training import mlp, replicate, train_ensemble

ROOT = Path(__file__).resolve().parent.parent
COMMIT = subprocess.run(
    ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT, check=False
).stdout.strip()
LEVELS = (0.8, 0.9, 0.95)
SETS = ("yacht", "boston", "energy", "concrete", "kin8nm", "bike", "protein")
DEEP = ("bike", "protein")  # three hidden layers, as in the paper


def methods(model, l2, rows, cal, arguments):
    """What is compared, by name: methods that hold nothing out where there are no calibration rows."""
    if len(cal[0]) == 0 and arguments.brief:
        return {"ACP-GN": lambda: fullcp.FullConformalRegressor(model, l2=l2).conformalize(*rows)}
    if len(cal[0]) == 0:
        full = fullcp.FullConformalRegressor(model, l2=l2)
        refined = fullcp.FullConformalRegressor(model, l2=l2, refine=True)
        plus = fullcp.JackknifePlusRegressor(model, l2=l2)
        plain = fullcp.JackknifePlusRegressor(model, normalized=False, l2=l2)
        made = {"ACP-GN": full, "ACP-GN, refined": refined, "jackknife+": plus, "jackknife+, plain": plain}
        if arguments.cv_plus:
            how = {"folds": 10, "l2": "marglik", "epochs": arguments.epochs}
            made |= {"CV+": fullcp.CVPlusRegressor(model, **how)}
            made |= {"CV+, plain": fullcp.CVPlusRegressor(model, normalized=False, **how)}
        return {name: lambda cp=cp: cp.conformalize(*rows) for name, cp in made.items()}
    informed = fullcp.InformedSplitConformalRegressor(model, l2=l2)
    normalized = fullcp.NormalizedSplitConformalRegressor(model, l2=l2)
    refined = fullcp.RefinedSplitConformalRegressor(model, l2=l2)
    found = {
        "informed split": lambda: informed.fit(*rows).conformalize(*cal),
        "SCP-GN": lambda: normalized.fit(*rows).conformalize(*cal),
        "split + refine": lambda: refined.conformalize(*cal),
    }
    if not arguments.brief:
        other = fullcp.InformedSplitConformalRegressor(model, l2="leave_one_out")
        found["informed split, leave-one-out l2"] = lambda: other.fit(*rows).conformalize(*cal)
    return found


def run(name, arguments):
    """The rows of one set: {(method, share, level): (widths, coverages, seconds, calibration rows)}."""
    table = load_dataset(name)
    X, y = table.X, table.y
    rng_splits = list(random_splits(len(X), arguments.splits, seed=arguments.seed))
    proposed = fullcp.calibration_share(len(rng_splits[0][0]), 0.9)
    shares = [0.0, proposed, *arguments.shares]
    parts, data = [], []
    for train, test in rng_splits:
        for share in shares:
            rows, held = halves(train, share=share) if share else (train, train[:0])
            a, b = Standardizer.of(X[rows]), Standardizer.of(y[rows])  # calibration rows have no part in it
            parts.append((share, a, b, rows, held, test))
            data.append((a.transform(X[rows]), b.transform(y[rows])))
    hidden = arguments.hidden or ([50] * 3 if name in DEEP else [50])
    models = replicate(lambda: mlp(X.shape[1], hidden), range(arguments.seed, arguments.seed + len(parts)))
    started = time.perf_counter()
    if arguments.l2 is None:
        runs = train_ensemble(models, data, l2="marglik", epochs=arguments.epochs)
    else:
        runs = train_ensemble(models, data, l2=arguments.l2, epochs=arguments.epochs)
    trained = (time.perf_counter() - started) / len(parts)
    found = {}
    steps = list(zip(parts, data, models, runs, strict=True))
    for (share, a, b, _, held, test), rows, model, training in track(steps, name, len(steps)):
        cal = (a.transform(X[held]), b.transform(y[held]))
        for method, make in methods(model, training.l2, rows, cal, arguments).items():
            started = time.perf_counter()
            prediction, intervals = make().predict_interval(a.transform(X[test]), LEVELS)
            seconds = time.perf_counter() - started
            result = fullcp.PredictionIntervals(b.inverse(prediction), b.inverse(intervals), LEVELS)
            for level, scored in zip(LEVELS, evaluate(y[test], result, LEVELS), strict=True):
                values = (scored.mean_width, scored.coverage, seconds, len(held) or len(rows[0]), len(test))
                found.setdefault((method, share, level), []).append(values)
    return found, trained


def summarise(name, found, trained, arguments):
    """Rows for the CSV: means over splits, with their standard errors."""
    facts = {
        "epochs": arguments.epochs,
        "seeds": f"splits {arguments.seed} of default_rng([seed; i]); networks from {arguments.seed} on",
        "command": "python benchmarks/informed.py " + shlex.join(sys.argv[1:]),
        "commit": COMMIT,
        "machine": f"{platform.machine()}; torch {torch.__version__}; {torch.get_num_threads()} thread(s)",
    }
    for (method, share, level), values in found.items():
        width, coverage, seconds, rows, test = np.array(values, float).T
        error = max(1, len(values) - 1) ** 0.5
        yield {
            "dataset": name,
            "method": method,
            "calibration_share": f"{share:.4g}",
            "level": level,
            "width": f"{width.mean():.5g}",
            "width_se": f"{width.std() / error:.2g}",
            "coverage": f"{coverage.mean():.4f}",
            "coverage_se": f"{coverage.std() / error:.4f}",
            "splits": len(values),
            "conformal_rows": int(rows[0]),
            "test_rows": int(test[0]),
            "train_seconds": f"{trained:.2f}",
            "seconds": f"{seconds.mean():.3f}",
            **facts,
        }


def write(path, rows):
    """Put rows into the file, in place of those of the same set."""
    kept = []
    if path.exists():
        with path.open() as file:
            names = {row["dataset"] for row in rows}
            kept = [row for row in csv.DictReader(file) if row["dataset"] not in names]
    rows = sorted([*kept, *rows], key=lambda row: SETS.index(row["dataset"]))
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_suffix(".part")
    with temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    temporary.replace(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sets", nargs="*", choices=[[], *SETS])
    parser.add_argument("--splits", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=5000)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.25, 0.5, 0.75])
    parser.add_argument("--l2", type=float, help="a fixed penalty in place of the marginal likelihood")
    parser.add_argument("--hidden", type=int, nargs="+", help="hidden layers other than the paper's")
    parser.add_argument("--brief", action="store_true", help="ACP-GN, the informed split, SCP-GN, split + refine alone")
    parser.add_argument("--cv-plus", action="store_true", help="CV+ too, which trains ten networks a split")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "informed_split.csv")
    parser.add_argument("--picture", type=Path, help="draw what the results file holds, and where to put it")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if arguments.sets and "FULLCP_DATA" not in os.environ:
        sys.exit("set FULLCP_DATA to the folder that holds uci/")
    for name in arguments.sets:
        rows = list(summarise(name, *run(name, arguments), arguments))
        write(arguments.output, rows)
        for row in rows:
            if row["level"] == 0.9:
                print(
                    *(row[key] for key in ("dataset", "method", "calibration_share", "width", "width_se", "coverage"))
                )
    if arguments.picture:
        with arguments.output.open() as file:
            figure = width_against_share(list(csv.DictReader(file)), level=0.9)
        figure.savefig(arguments.picture, dpi=120)


if __name__ == "__main__":
    main()
