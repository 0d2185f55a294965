"""The paper's tables on one GPU: a process a data set, and the run folder packed into files of bounded size.

    FULLCP_DATA=data python benchmarks/tables.py --datasets yacht boston --stage train --pack out --limit 550

Tables without data sets (synthetic_fullcp, bbox, bbox_50) have a process of their own where they are among --tables.
Wants nothing that the library itself does not. What is not done after --limit seconds is stopped; the same command goes
on with the run folder that `--unpack` puts together again. The exit status is 1 where a process failed.
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

from fullcp.experiments.reproduction import BOXES, SYNTHETIC, Request, run
from fullcp.experiments.tables import SPECS, TABLES

PART = 15 * 2**20
ALONE = {"synthetic": (SYNTHETIC,), "boxes": BOXES}  # work that belongs to no data set, and its tables


def jobs(tables, datasets):
    """What has a process: each data set, and the tables without one, whether named among the data sets or not."""
    own = [name for name, theirs in ALONE.items() if name in datasets or set(theirs) & set(tables)]
    return [*own, *(name for name in datasets if name not in ALONE)]


def tables_of(tables, job):
    """The tables that a process makes; "synthetic" or "boxes" named without a table of theirs is all of them."""
    if job in ALONE:
        return tuple(name for name in tables if name in ALONE[job]) or ALONE[job]
    return tuple(name for name in tables if name in SPECS and job in SPECS[name].datasets)


def request(options, job):
    return Request(
        tables=tables_of(options.tables, job),
        datasets=None if job in ALONE else (job,),
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
    """One job, in this process."""
    (job,) = options.datasets
    start = time.perf_counter()

    def say(text):
        print(f"[{time.perf_counter() - start:7.1f} s] {text}", flush=True)

    say(f"{job} begins")
    run(request(options, job), say)
    say(f"{job} ends")


def words_without(words, *options):
    """The words of a command without these options and what follows them."""
    kept, skipping = [], False
    for word in words:
        if word.startswith("--"):
            skipping = word.split("=")[0] in options
        kept += [] if skipping else [word]
    return kept


def several(options):
    """A process a job, `--jobs` at a time; returns those that failed."""
    waiting, running, failed = jobs(options.tables, options.datasets), {}, []
    start = time.perf_counter()
    own = words_without(sys.argv[1:], "--datasets")
    while waiting or running:
        while waiting and len(running) < options.jobs:
            job = waiting.pop(0)
            command = [sys.executable, __file__, *own, "--single", "--datasets", job]
            running[job] = subprocess.Popen(command)
        time.sleep(0.2)
        for job in [name for name, process in running.items() if process.poll() is not None]:
            code = running.pop(job).returncode
            print(f"[{time.perf_counter() - start:7.1f} s] {job}: exit {code}", flush=True)
            failed += [job] if code else []
        if time.perf_counter() - start > options.limit:
            for process in running.values():
                process.terminate()
            for process in running.values():
                process.wait()  # whole lines and whole networks alone are packed
            print(f"stopped after {options.limit} s: {', '.join([*running, *waiting])}", flush=True)
            break
    if failed:
        print(f"failed: {', '.join(failed)}", flush=True)
    return failed


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
    if options.stage in ("write", "all") and options.jobs > 1:
        parser.error("processes would write the same tables: take --jobs 1, or --stage train and evaluate first")
    if options.unpack:
        unpack(options.unpack, options.run_dir)
    os.makedirs(options.run_dir, exist_ok=True)
    failed = several(options)
    if options.pack:
        pack(options.run_dir, options.pack)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
