"""`fullcp reproduce`: the paper's tables, trained, evaluated and written."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fullcp.commands.app import app
from fullcp.commands.spread import Spread
from fullcp.data import DATASETS
from fullcp.experiments.reproduction import EVERY_METHOD, EVERY_TABLE, LEAST_EPOCHS
from fullcp.experiments.tables import SHARE_FIGURE

notes = Console(stderr=True, highlight=False, soft_wrap=True)


@app.command(cls=Spread)
def reproduce(
    table: Annotated[
        list[str],
        typer.Option(
            help=f"Table: {', '.join(name for name in EVERY_TABLE if name != SHARE_FIGURE.name)}; or "
            f"{SHARE_FIGURE.name}, for the figure."
        ),
    ],
    datasets: Annotated[
        list[str] | None, typer.Option(help=f"Of {', '.join(DATASETS)}; all of the table unless given.")
    ] = None,
    methods: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(EVERY_METHOD)}; all unless given.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Repeats; the paper's 10 or 20 unless given.")] = None,
    epochs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Epochs; the paper's unless given. At least {LEAST_EPOCHS} on small and medium sets, where l2 is "
            "tuned as networks train.",
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
    stage: Annotated[str, typer.Option(help="train, evaluate, write, or all.")] = "all",
    run_dir: Annotated[Path, typer.Option(help="Folder for networks and folds; resumed where it exists.")] = Path(
        "runs"
    ),
    output: Annotated[Path, typer.Option(help="Folder for the tables.")] = Path("results"),
    memory: Annotated[str, typer.Option(help="Working memory of the predictors.")] = "4GB",
    scaling: Annotated[
        str, typer.Option(help="training, or authors: their scaling mistake, made to see what it explains.")
    ] = "training",
    images: Annotated[
        Path | None,
        typer.Option(help="bbox: folder of the Oxford-IIIT Pet data, or a packed file; FULLCP_DATA unless given."),
    ] = None,
    weights: Annotated[Path | None, typer.Option(help="bbox: weights of VGG-19; FULLCP_DATA unless given.")] = None,
    frozen: Annotated[
        bool, typer.Option("--frozen", help="bbox: train heads alone; the tables are then called bbox_frozen, ...")
    ] = False,
) -> None:
    """Train the networks of a table as ensembles, evaluate every method on them, write the table."""
    from fullcp.experiments import reproduction
    from fullcp.experiments.box_tables import Photographs
    from fullcp.vision import DivergedError

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
        scaling=scaling,
        photographs=Photographs(images, weights, frozen),
    )
    try:
        reproduction.run(
            request, say=lambda text: notes.print(f"[{time.perf_counter() - start:7.1f} s] {text}", markup=False)
        )
    except (ValueError, OSError, ImportError, DivergedError) as error:
        notes.print(f"fullcp: {error}", style="red", markup=False)
        sys.exit(1)
