"""`fullcp figures`: the paper's two figures of real runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fullcp.commands.app import app

notes = Console(stderr=True, highlight=False, soft_wrap=True)


@app.command()
def figures(
    results: Annotated[Path, typer.Option(help="Folder with the tables.")] = Path("results"),
    output: Annotated[Path, typer.Option(help="Folder for the pictures.")] = Path("figures"),
    dataset: Annotated[str, typer.Option(help="Data set of the figure of calibration shares.")] = "protein",
    seed: Annotated[int, typer.Option(help="Seed of the one-dimensional example.")] = 0,
) -> None:
    """Draw adaptivity in one dimension, and width and coverage against the calibration share."""
    from fullcp import plots
    from fullcp.experiments import introduction, shares
    from fullcp.experiments.results import read_rows
    from fullcp.experiments.tables import SHARE_FIGURE

    try:
        path = results / f"{SHARE_FIGURE.name}.csv"
        rows = read_rows(path)
        output.mkdir(parents=True, exist_ok=True)
        plots.introduction_figure(introduction.run(seed=seed)).savefig(output / "adaptivity.png", dpi=150)
        notes.print(f"wrote {output / 'adaptivity.png'}")
        curves = shares.curves(rows, dataset)
        if not curves:
            what = f"has no rows of {dataset}" if path.exists() else "does not exist"
            command = f"fullcp reproduce --table {SHARE_FIGURE.name}"
            raise ValueError(f"{path} {what}: run `{command}` for the figure of calibration shares")
        plots.shares_figure(curves, dataset).savefig(output / "calibration_share.png", dpi=150)
        notes.print(f"wrote {output / 'calibration_share.png'}")
    except (ValueError, OSError) as error:
        notes.print(f"fullcp: {error}", style="red", markup=False)
        sys.exit(1)
