"""`fullcp compare`: the tables that were reproduced, beside the paper's."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from fullcp.commands.app import app
from fullcp.commands.spread import Spread

if TYPE_CHECKING:
    from fullcp.experiments.comparison import Cell, Difference, Figure

notes = Console(stderr=True, highlight=False, soft_wrap=True)
console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
_MARKS = {"yes": "ok", "no": "x", "": ""}


@app.command(cls=Spread)
def compare(
    results: Annotated[Path, typer.Option(help="Folder that `fullcp reproduce` wrote tables to.")] = Path("results"),
    table: Annotated[list[str] | None, typer.Option(help="Tables; all that are there unless given.")] = None,
    datasets: Annotated[list[str] | None, typer.Option(help="Data sets; all unless given.")] = None,
    scaling: Annotated[str, typer.Option(help="Of the tables: training, or authors.")] = "training",
    summary: Annotated[bool, typer.Option(help="Leave the tables out, print what agrees and what does not.")] = False,
) -> None:
    """Print each table with our figures, the paper's, and their difference in standard errors."""
    from fullcp.experiments import claims, comparison
    from fullcp.experiments.authors_scaling import SCALINGS
    from fullcp.experiments.box_tables import FROZEN
    from fullcp.experiments.reproduction import BOXES, SYNTHETIC
    from fullcp.experiments.tables import TABLES
    from fullcp.inputs import check_choice

    every = (*TABLES, SYNTHETIC, *BOXES, *FROZEN)
    try:
        for name in table or ():
            check_choice("table", name, every)
        check_choice("scaling", scaling, SCALINGS)
        rows = comparison.read_results(results, table or every, scaling)
    except (ValueError, OSError) as error:
        notes.print(f"fullcp: {error}", style="red", markup=False)
        sys.exit(1)
    rows = [row for row in rows if datasets is None or row["dataset"] in datasets]
    if not rows:
        notes.print(f"fullcp: {results} has no such tables: run `fullcp reproduce` first", style="red", markup=False)
        sys.exit(1)
    cells = comparison.compare(rows)
    if not summary:
        for pair in dict.fromkeys((cell.key[0], cell.key[1]) for cell in cells):
            _print_table(*pair, [cell for cell in cells if cell.key[:2] == pair])
    _print_agreement(cells)
    _print_differing(cells)
    for verdict in claims.check_claims(rows):
        console.print(f"{'holds' if verdict.holds else 'FAILS'}: {verdict.claim} ({verdict.numbers})", markup=False)


def _print_table(table: str, dataset: str, cells: Sequence[Cell]) -> None:
    from fullcp.report import print_table

    first = cells[0].ours
    about = f", {dataset}, {first['n']} rows, {first['inputs']} inputs" if dataset else ""
    lines = []
    for cell in cells:
        width, coverage = (cell.differences.get(m) for m in ("width", "coverage"))
        ours = cell.ours
        lines.append(
            [
                _name(cell),
                ours["level"],
                _shown(ours["size"], ours["size_se"]),
                _printed(width),
                _errors(width),
                f"{width.relative:+.1%}" if width and width.is_comparable else "",
                _shown(ours["coverage"], ours["coverage_se"], 2),
                _printed(coverage),
                _errors(coverage),
                f"{_MARKS[ours['valid']]} / {_MARKS[cell.paper['valid']] if cell.paper else ''}",
                f"{float(ours['infinite']):.1%}" if float(ours["infinite"]) else "",
                ours["repeats"],
            ]
        )
    names = ["", "level", "width", "paper", "diff/se", "diff", "coverage", "paper", "diff/se"]
    print_table(f"{table}{about}", [*names, "valid", "infinite", "repeats"], lines, console=console)


def _print_agreement(cells: Sequence[Cell]) -> None:
    from fullcp.experiments.comparison import MEASURES, Agreement

    for measure in MEASURES:
        found = Agreement.of([cell.differences[measure] for cell in cells if cell.paper is not None])
        if not found.comparable:
            continue
        shares = [f"{k} ({k / found.comparable:.1%})" for k in (found.within_2, found.within_4, found.agree)]
        rule = "within 4 standard errors or 5 %" if measure == "width" else "agree"
        console.print(
            f"{measure}: of {found.comparable} figures {shares[0]} are within 2 combined standard errors, "
            f"{shares[1]} within 4, {shares[2]} {rule}",
            markup=False,
        )
    marks = [(c.ours["valid"], c.paper["valid"]) for c in cells if c.paper is not None and c.paper["valid"]]
    if marks:
        console.print(f"validity marks: {sum(a == b for a, b in marks)} of {len(marks)} are the paper's", markup=False)


def _print_differing(cells: Sequence[Cell]) -> None:
    from fullcp.experiments.comparison import differing, explain, explanations

    known = explanations()
    grouped: dict[str, list[str]] = {}
    for cell, d in differing(cells):
        name = f"{cell.key[0]} {cell.key[1]} {_name(cell)} {cell.key[4]} {d.measure}".replace("  ", " ")
        figures = f"{_figure(d.ours)} against {_figure(d.paper)}"
        grouped.setdefault(explain(cell, d.measure, known), []).append(f"{name}: {figures}")
    for because in sorted(grouped, key=lambda text: text == ""):
        console.print(f"\n{because or 'Not explained'} ({len(grouped[because])}):", markup=False)
        for line in grouped[because]:
            console.print(f"  {line}", markup=False)
    if grouped:
        console.print()


def _name(cell: Cell) -> str:
    """The method, its curvature unless full, and the calibration share of methods that stand there with several."""
    curvature = f" ({cell.ours['curvature']})" if cell.ours["curvature"] else ""
    share = f", {cell.ours['calibration']} %" if cell.ours["method"] == "informed" else ""
    return f"{cell.ours['method']}{curvature}{share}"


def _shown(value: str, error: str, digits: int | None = None) -> str:
    text = value if digits is None else f"{float(value):.{digits}f}"
    if digits is None and isfinite(float(value)):
        text = f"{float(value):.4g}"
    return f"{text} ±{float(error):.2g}" if error else text


def _printed(d: Difference | None) -> str:
    if d is None:
        return ""
    return _figure(d.paper) if isfinite(d.paper.value) else "---"


def _figure(figure: Figure) -> str:
    error = f" ±{figure.error:.2g}" if isfinite(figure.error) else ""
    return f"{figure.value:.5g}{error}"


def _errors(d: Difference | None) -> str:
    return f"{d.errors:+.1f}" if d is not None and d.is_comparable else ""
