"""Tables on a terminal, the same as plain text in a pipe, and as CSV."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table


def print_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, console: Console | None = None
) -> None:
    """Print a table whose first column holds names and whose other columns hold numbers."""
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    table.collapse_padding = True  # a row of seven numbers fits 80 columns
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    (console or Console()).print(table)


def write_csv(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write rows of equal keys as CSV, by way of a temporary file so that no half of one is left."""
    temporary = path.with_name(f".{path.name}.part")
    try:
        with temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
