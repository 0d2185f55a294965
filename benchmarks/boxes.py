r"""The boxes experiment on a GPU machine: networks of several seeds, their regions, one JSON file with provenance.

    FULLCP_DATA=../shared/data python benchmarks/boxes.py pack --output packed_pets.safetensors
    python benchmarks/boxes.py train --images packed_pets.safetensors --weights vgg19_features_fp16.safetensors \
        --seeds 3 --epochs 20 --folder /tmp/fine
    python benchmarks/boxes.py evaluate --images packed_pets.safetensors --folder /tmp/fine --processes 3 \
        --output results/boxes_finetuned.json --view view.safetensors

`pack` puts the JPEG files into one of 41 MiB. Training wants the GPU; evaluation goes on beside it, a process a seed.
None needs typer, rich or matplotlib. What is stopped goes on in the same --folder; with --limit, training begins no
further seed after so many seconds.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from math import isfinite, isnan
from multiprocessing import get_context
from pathlib import Path

import torch

from fullcp.data import load_packed, load_pets, pack_pets
from fullcp.experiments.box_networks import Plan, load_trained, train_seeds
from fullcp.experiments.box_views import view_seed
from fullcp.experiments.boxes import evaluate_seed, summarise
from fullcp.experiments.provenance import commit
from fullcp.vision import Recipe, balance, load_vgg19, normalized


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    packing, training, evaluating = (commands.add_parser(name) for name in ("pack", "train", "evaluate"))
    for command in (packing, training, evaluating):
        command.add_argument("--images", type=Path, help="packed file or folder; without it FULLCP_DATA")
    packing.add_argument("--output", type=Path, required=True)
    for command in (training, evaluating):
        command.add_argument("--folder", type=Path, required=True)
    training.add_argument("--weights", type=Path, required=True)
    training.add_argument("--seeds", type=int, default=20)
    training.add_argument("--frozen", action="store_true")
    training.add_argument("--epochs", type=int, default=200)
    training.add_argument("--learning-rate", type=float, default=1e-2)
    training.add_argument("--trunk", type=int, default=4096)
    training.add_argument("--at-once", type=int, default=20)
    training.add_argument("--limit", type=float, default=float("inf"), help="seconds after which no seed is begun")
    evaluating.add_argument("--processes", type=int, default=1)
    evaluating.add_argument("--output", type=Path, required=True)
    evaluating.add_argument("--view", type=Path, help="what pictures need of the first seed goes here")
    arguments = parser.parse_args()
    {"pack": pack, "train": train, "evaluate": evaluate}[arguments.command](arguments)


def pack(arguments):
    print(f"{arguments.output}: {pack_pets(arguments.images, arguments.output) / 2**20:.1f} MiB")


def read(arguments):
    images = arguments.images
    return load_packed(images) if images is not None and images.is_file() else load_pets(images)


def train(arguments):
    start = time.perf_counter()
    data = read(arguments)
    say(start, f"{len(data)} images read")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    backbone = balance(load_vgg19(arguments.weights).to(device), normalized(data.images[:16].to(device)))
    recipe = Recipe(epochs=arguments.epochs, learning_rate=arguments.learning_rate)
    plan = Plan(frozen=arguments.frozen, recipe=recipe, trunk=(arguments.trunk, arguments.trunk))
    # With a frozen backbone seeds train together, else one by one.
    groups = [range(arguments.seeds)] if arguments.frozen else [[seed] for seed in range(arguments.seeds)]
    for group in groups:
        if time.perf_counter() - start > arguments.limit:
            return say(start, f"the limit is reached: seeds from {group[0]} on are left out")
        for seed in train_seeds(
            data, lambda: backbone, plan, group, arguments.folder, device=device, at_once=arguments.at_once
        ):
            say(start, f"seed {seed} trained")
    return None


def evaluate(arguments):
    start = time.perf_counter()
    data = read(arguments)
    seeds = sorted(int(path.stem[5:]) for path in arguments.folder.glob("seed_*.safetensors"))
    if not seeds:
        sys.exit(f"no seed is trained in {arguments.folder}")
    work = partial(evaluate_alone, data.without_pixels(), arguments.folder)
    rows = []
    with ProcessPoolExecutor(arguments.processes, mp_context=get_context("spawn")) as pool:
        for seed, found in zip(seeds, pool.map(work, seeds), strict=True):
            rows += found
            say(start, f"seed {seed} evaluated")
    seconds = {(row.seed, row.table): row.train_seconds for row in rows}
    report = {
        "command": "python benchmarks/boxes.py " + " ".join(sys.argv[1:]),
        "commit": commit(),
        "machine": f"{platform.machine()}, torch {torch.__version__}"
        + (f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""),
        "plan": load_trained(arguments.folder, seeds[0])[0].facts(),
        "seeds": seeds,
        "train_seconds_per_seed": round(sum(seconds.values()) / len(seeds), 1),
        "evaluation_seconds_per_seed": round(sum(row.seconds for row in rows if row.level == 0.9) / len(seeds), 1),
        "methods": [{key: rounded(value) for key, value in row.items()} for row in summarise(rows)],
    }
    arguments.output.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")
    for row in report["methods"]:
        if row["level"] == 0.9:
            name = f"{row['table']:8} {row['method']:32} {row['joint']:10}"
            print(f"{name} {float(row['volume']):9.4f} {row['coverage']:.4f}")
    if arguments.view is not None:
        view_seed(data, arguments.folder, seeds[0]).save(arguments.view)
        say(start, f"the view of seed {seeds[0]} is written")


def evaluate_alone(data, folder, seed):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # networks trained with another loss are far from the minimum, as in the paper
    return evaluate_seed(data, folder, seed)


def say(start, what):
    print(f"{time.perf_counter() - start:7.1f} s  {what}", flush=True)


def rounded(value):
    """Five digits; what JSON has no number for, infinite volumes and errors of one seed, as a word or as null."""
    if not isinstance(value, float):
        return value
    if isnan(value):
        return None
    return float(f"{value:.5g}") if isfinite(value) else str(value)


if __name__ == "__main__":
    main()
