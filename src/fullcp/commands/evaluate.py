"""`fullcp evaluate`: the methods side by side on a table of the user's own."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from fullcp.commands.app import app
from fullcp.commands.spread import Spread
from fullcp.experiments.own_table import EPOCHS, METHODS, evaluate_table
from fullcp.experiments.reproduction import LEAST_EPOCHS

if TYPE_CHECKING:
    from fullcp.experiments.results import Row

notes = Console(stderr=True, highlight=False, soft_wrap=True)
console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)


@app.command(cls=Spread)
def evaluate(
    file: Annotated[Path, typer.Argument(help="Table of numbers: .csv, .txt (.gz too), .parquet, .npy or .npz.")],
    target: Annotated[
        str | None, typer.Option(help="Column to predict; the last one unless given. NumPy's are named 0, 1, ...")
    ] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="Columns to leave out.")] = None,
    methods: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(METHODS)}; all unless given.")] = None,
    calibration: Annotated[int, typer.Option(help="Per cent of training rows that calibrate: 25 or 50.")] = 25,
    seeds: Annotated[
        int, typer.Option(min=1, help="Times that rows are split anew: ten folds, or 90 and 10 % of over 5,000 rows.")
    ] = 1,
    epochs: Annotated[
        int, typer.Option(min=1, help=f"Training epochs, at least {LEAST_EPOCHS}; the paper takes 5000.")
    ] = EPOCHS,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
    memory: Annotated[str, typer.Option(help="Working memory of the predictors.")] = "4GB",
    run_dir: Annotated[
        Path | None, typer.Option(help="Folder to keep networks in, and to go on with; nothing is kept unless given.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="CSV file for the figures.")] = None,
) -> None:
    """Train the paper's network on a table of your own, and print width and coverage of every method."""
    from fullcp.data import load_table
    from fullcp.report import write_csv

    start = time.perf_counter()

    def say(text: str) -> None:
        notes.print(f"[{time.perf_counter() - start:7.1f} s] {text}", markup=False)

    try:
        if output is not None and (output.is_dir() or not output.parent.is_dir()):
            raise ValueError(f"output must be a file in a folder that exists, got {output}")
        table = load_table(file, target, exclude=exclude)
        rows = evaluate_table(
            table,
            say,
            methods=methods,
            calibration=calibration,
            seeds=seeds,
            epochs=epochs,
            device=device,
            memory=memory,
            run_dir=run_dir,
        )
    except (ValueError, TypeError, OSError, ImportError) as error:
        notes.print(f"fullcp: {error}", style="red", markup=False)
        sys.exit(1)
    _print(rows, f"{table.name}: {table.target}, {len(table)} rows, {table.X.shape[1]} inputs")
    if output is not None:
        write_csv(output, rows)
        notes.print(f"wrote {output}")


def _print(rows: list[Row], title: str) -> None:
    from fullcp.report import print_table

    levels = list(dict.fromkeys(row["level"] for row in rows))
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["method"], []).append(row)
    names = [f"{what}\n{level} %" for what in ("width", "coverage") for level in levels]
    cells = [
        [
            method,
            f"{own[0]['calibration']} %" if own[0]["calibration"] else "",
            *(_shown(row["size"], row["size_se"], 4) for row in own),
            *(_shown(row["coverage"], row["coverage_se"], 3) + (" " if _valid(row) else "x") for row in own),
        ]
        for method, own in groups.items()
    ]
    print_table(title, ["", "calibrates", *names], cells, console=console)
    console.print(
        f"Means over {rows[0]['folds']} test part(s), with standard errors where there are several. x: mean coverage "
        "outside of what so many calibrating rows promise in 98 % of all cases; on few test rows chance puts it there "
        "too (--seeds).",
        markup=False,
    )


def _valid(row: Row) -> bool:
    return bool(row["valid"] == "yes")


def _shown(value: str, error: str, digits: int) -> str:
    text = f"{float(value):.{digits}g}"
    return f"{text} ±{float(error):.2g}" if error else text
