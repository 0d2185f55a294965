"""`fullcp demo`: seven methods on data that come with scikit-learn."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from fullcp.commands.app import app, console


@app.command()
def demo(
    output: Annotated[Path, typer.Option(help="Folder for the picture and the table.")] = Path("demo_output"),
    splits: Annotated[int, typer.Option(min=1, help="Random splits to average over.")] = 10,
    epochs: Annotated[int, typer.Option(min=1, help="Training epochs of each network.")] = 300,
    seed: Annotated[int, typer.Option(help="Seed of splits and networks.")] = 0,
) -> None:
    """Compare seven methods on the diabetes data and draw the paper's first figure."""
    import torch

    from fullcp import plots
    from fullcp.experiments import diabetes, introduction
    from fullcp.report import print_table, write_csv

    if output.exists() and not output.is_dir():
        raise typer.BadParameter(f"{output} is a file; a folder is wanted", param_hint="--output")
    try:
        output.mkdir(parents=True, exist_ok=True)
        (output / ".writable").touch()
        (output / ".writable").unlink()
    except OSError as error:
        raise typer.BadParameter(f"{output} cannot be written: {error.strerror}", param_hint="--output") from error
    start = time.perf_counter()
    torch.set_num_threads(1)  # all of this is small: a second thread gains a tenth, and waits on a busy machine
    rows = diabetes.run(splits, epochs=epochs, seed=seed)
    methods = list(dict.fromkeys(row.method for row in rows))
    levels = list(dict.fromkeys(row.level for row in rows))
    print_table(
        f"Diabetes, {splits} splits: mean width and coverage (%), with standard errors",
        ["", *(f"width\n{level:.0%}" for level in levels), *(f"coverage\n{level:.0%}" for level in levels)],
        [
            [
                method,
                *(_cell(row.width, row.width_se, 0) for row in rows if row.method == method),
                *(_cell(100 * row.coverage, 100 * row.coverage_se, 1) for row in rows if row.method == method),
            ]
            for method in methods
        ],
        console=console,
    )
    console.print(
        "ACP-GN, jackknife+ and LA use all training rows, without a guarantee of coverage. The informed\n"
        "split keeps a quarter of the rows for calibration, SCP-GN, SCP and split + refine half; they have one.",
        highlight=False,
        soft_wrap=True,
    )
    write_csv(output / "diabetes.csv", [row.as_dict() for row in rows])
    plots.introduction_figure(introduction.run(seed=seed)).savefig(output / "figure1.png", dpi=150)
    seconds = time.perf_counter() - start
    console.print(
        f"Wrote {output / 'figure1.png'} and {output / 'diabetes.csv'} in {seconds:.0f} s",
        highlight=False,
        soft_wrap=True,
    )


def _cell(mean: float, error: float, digits: int) -> str:
    """A mean and its standard error, where there is one."""
    return f"{mean:.{digits}f}" if error != error else f"{mean:.{digits}f} ±{error:.{digits}f}"
