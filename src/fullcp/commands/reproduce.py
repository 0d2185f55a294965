"""`fullcp reproduce`: the paper's tables, trained, evaluated and written."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.console import Console

from fullcp.commands.app import app

notes = Console(stderr=True, highlight=False, soft_wrap=True)


@app.command()
def reproduce(
    table: Annotated[list[str], typer.Option(help="Table: main, extra, main_25, ...; may be given several times.")],
    datasets: Annotated[
        Optional[list[str]], typer.Option(help="Data sets of the table; all unless given. May be given several times.")  # noqa: UP045
    ] = None,
    methods: Annotated[Optional[list[str]], typer.Option(help="Methods; all unless given.")] = None,  # noqa: UP045
    seeds: Annotated[Optional[int], typer.Option(min=1, help="Repeats; the paper's 10 or 20 unless given.")] = None,  # noqa: UP045
    epochs: Annotated[Optional[int], typer.Option(min=1, help="Epochs; the paper's unless given.")] = None,  # noqa: UP045
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
    stage: Annotated[str, typer.Option(help="train, evaluate, or all.")] = "all",
    run_dir: Annotated[Path, typer.Option(help="Folder for networks and folds; resumed where it exists.")] = Path("runs"),
    output: Annotated[Path, typer.Option(help="Folder for the tables.")] = Path("results"),
    memory: Annotated[str, typer.Option(help="Working memory of the predictors.")] = "4GB",
) -> None:
    """Train the networks of a table as ensembles, evaluate every method on them, write the table."""
    from fullcp.experiments import reproduction

    start = time.perf_counter()
    request = reproduction.Request(
        tables=tuple(table),
        datasets=None if datasets is None else tuple(datasets),
        methods=None if methods is None else tuple(methods),
        seeds=seeds,
        epochs=epochs,
        device=device,
        stage=stage,
        run_dir=run_dir,
        output=output,
        memory=memory,
    )
    try:
        reproduction.run(request, say=lambda text: notes.print(f"[{time.perf_counter() - start:7.1f} s] {text}", markup=False))
    except (ValueError, OSError) as error:
        notes.print(f"fullcp: {error}", style="red", markup=False)
        sys.exit(1)
