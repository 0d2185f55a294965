"""The application that commands join."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console

from fullcp.version import __version__

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Full conformal intervals for neural networks.")
console = Console(width=None if sys.stdout.isatty() else 200)  # tables are not cut off in pipes and files


def _version(wanted: bool) -> None:
    if wanted:
        console.print(f"fullcp {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Full conformal prediction intervals for trained neural-network regressors."""
