"""The paper's tables on one GPU: a process a data set, and the run folder packed into files of bounded size.

    FULLCP_DATA=data python benchmarks/tables.py --datasets yacht boston --stage train --pack out --limit 550

Wants nothing that the library itself does not. What is not done after --limit seconds is stopped; the same command goes
on with the run folder that `--unpack` puts together again.
"""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path

from fullcp.experiments.reproduction import SYNTHETIC, Request, run
from fullcp.experiments.tables import SPECS, TABLES

PART = 15 * 2**20


def request(options, dataset):
    tables = [name for name in options.tables if name == SYNTHETIC or dataset in SPECS[name].datasets]
    if dataset == "synthetic":
        tables = [SYNTHETIC]
    return Request(
        tables=tuple(tables),
        datasets=None if dataset == "synthetic" else (dataset,),
        methods=tuple(options.methods) if options.methods else None,
        seeds=options.seeds,
        epochs=options.epochs,
        device=options.device,
        stage=options.stage,
        run_dir=options.run_dir,
        output=options.output,
        memory=options.memory,
        scaling=options.scaling,
    )


def single(options):
    """One data set, in this process."""
    (dataset,) = options.datasets
    start = time.perf_counter()

    def say(text):
        print(f"[{time.perf_counter() - start:7.1f} s] {text}", flush=True)

    say(f"{dataset} begins")
    run(request(options, dataset), say)
    say(f"{dataset} ends")


def several(options):
    """A process a data set, `--jobs` at a time."""
    waiting, running, failed = list(options.datasets), {}, []
    start = time.perf_counter()
    own = [a for a in sys.argv[1:] if a not in options.datasets and a != "--datasets"]
    while waiting or running:
        while waiting and len(running) < options.jobs:
            dataset = waiting.pop(0)
            command = [sys.executable, __file__, *own, "--single", "--datasets", dataset]
            running[dataset] = subprocess.Popen(command)
        time.sleep(0.2)
        for dataset in [d for d, p in running.items() if p.poll() is not None]:
            code = running.pop(dataset).returncode
            print(f"[{time.perf_counter() - start:7.1f} s] {dataset}: exit {code}", flush=True)
            failed += [dataset] if code else []
        if time.perf_counter() - start > options.limit:
            for process in running.values():
                process.terminate()
            print(f"stopped after {options.limit} s: {', '.join([*running, *waiting])}", flush=True)
            break
    if failed:
        print(f"failed: {', '.join(failed)}", flush=True)


def pack(folder, target):
    """The run folder as part-0, part-1, ...: a tar archive in pieces."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        archive.add(folder, arcname=".", filter=lambda m: None if m.name.endswith(".part") else m)
    content = buffer.getvalue()
    target.mkdir(parents=True, exist_ok=True)
    for i, at in enumerate(range(0, len(content), PART)):
        (target / f"run.tar.gz.{i}").write_bytes(content[at : at + PART])
    print(f"packed {len(content) / 2**20:.1f} MiB into {target}", flush=True)


def unpack(source, folder):
    """Put a packed run folder into `folder`, over what is there."""
    parts = sorted(source.glob("run.tar.gz.*"), key=lambda p: int(p.suffix[1:]))
    with tarfile.open(fileobj=io.BytesIO(b"".join(p.read_bytes() for p in parts)), mode="r:gz") as archive:
        archive.extractall(folder, filter="data")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", nargs="+", default=list(TABLES))
    parser.add_argument("--datasets", nargs="+", default=[])
    parser.add_argument("--methods", nargs="+")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--stage", default="train")
    parser.add_argument("--run-dir", type=Path, default=Path("runs"))
    parser.add_argument("--output", type=Path, default=Path("results"))
    parser.add_argument("--memory", default="4GB")
    parser.add_argument("--scaling", default="training")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=float, default=float("inf"))
    parser.add_argument("--pack", type=Path)
    parser.add_argument("--unpack", type=Path)
    parser.add_argument("--single", action="store_true")
    options = parser.parse_args()
    if options.single:
        single(options)
        return
    if options.unpack:
        unpack(options.unpack, options.run_dir)
    os.makedirs(options.run_dir, exist_ok=True)
    several(options)
    if options.pack:
        pack(options.run_dir, options.pack)


if __name__ == "__main__":
    main()
