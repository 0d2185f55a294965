"""`fullcp compare`: the tables that were reproduced, beside the paper's."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
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
        console.print(
            "diff: ours minus the paper's. valid: ours / the paper's; ok where coverage lies in the band of split "
            "conformal prediction, x where not.\n",
            markup=False,
        )
    _print_left_out(rows)
    _print_agreement(cells)
    _print_differing(cells)
    _print_seconds(rows)
    for verdict in claims.check_claims([row for row in rows if not comparison.other_epochs(row)]):
        console.print(f"{'holds' if verdict.holds else 'FAILS'}: {verdict.claim} ({verdict.numbers})", markup=False)


def _print_table(table: str, dataset: str, cells: Sequence[Cell]) -> None:
    from fullcp.report import print_table

    first = cells[0].ours
    about = f", {dataset}, {first['n']} rows, {first['inputs']} inputs" if dataset else ""
    about += _epochs([cell.ours for cell in cells])
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
                _both_marks(cell),
                f"{float(ours['infinite']):.1%}" if float(ours["infinite"]) else "",
                ours["repeats"],
            ]
        )
    names = ["", "level", "width", "paper", "diff/se", "diff", "coverage", "paper", "diff/se"]
    print_table(f"{table}{about}", [*names, "valid", "infinite", "repeats"], lines, console=console)


def _epochs(rows: Sequence[Mapping[str, str]]) -> str:
    """What is to be said of rows whose networks had other epochs than the paper's; nothing where all had those."""
    from fullcp.experiments.comparison import other_epochs

    epochs = sorted({found for row in rows if (found := other_epochs(row))})
    some = "" if all(other_epochs(row) for row in rows) else " in part"
    what = f"{some} trained for {' and '.join(map(str, epochs))} epochs: not comparable with the paper"
    return f",{what}" if epochs else ""


def _print_left_out(rows: Sequence[Mapping[str, str]]) -> None:
    groups: dict[tuple[str, str], list[Mapping[str, str]]] = {}
    for row in rows:
        groups.setdefault((row["table"], row["dataset"]), []).append(row)
    for (table, dataset), group in groups.items():
        if _epochs(group):
            console.print(f"{table} {dataset}".rstrip() + _epochs(group) + "; left out below", markup=False)


def _print_seconds(rows: Sequence[Mapping[str, str]]) -> None:
    from fullcp.experiments.comparison import evaluation_seconds

    for table in dict.fromkeys(row["table"] for row in rows):
        own = [row for row in rows if row["table"] == table]
        devices = " + ".join(dict.fromkeys(device for row in own for device in row["device"].split(" + ")))
        console.print(
            f"{table}: evaluation took {evaluation_seconds(own):.4g} s, all methods, data sets and folds ({devices})",
            markup=False,
        )


def _print_agreement(cells: Sequence[Cell]) -> None:
    from fullcp.experiments.comparison import MEASURES, Agreement, differing_marks, marked

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
    marks, others = marked(cells), differing_marks(cells)
    if marks:
        console.print(
            f"validity marks: {len(marks) - len(others)} of {len(marks)} are the paper's"
            + (f"; the other {len(others)} (ours / the paper's):" if others else ""),
            markup=False,
        )
    for cell in others:
        d = cell.differences["coverage"]
        figures = f"coverage {_figure(d.ours)} against {_figure(d.paper)}"
        console.print(f"  {_cell(cell)}: {_both_marks(cell)}, {figures}", markup=False)


def _print_differing(cells: Sequence[Cell]) -> None:
    from fullcp.experiments.comparison import CLASSES, class_of, differing, explain, explanations

    known = explanations()
    grouped: dict[str, list[str]] = {}
    for cell, d in differing(cells):
        line = f"{_cell(cell)} {d.measure}: {_figure(d.ours)} against {_figure(d.paper)}"
        grouped.setdefault(explain(cell, d.measure, known), []).append(line)
    if not grouped:
        return
    counts = {name: sum(len(v) for k, v in grouped.items() if class_of(k) == name) for name in CLASSES}
    shares = ", ".join(f"{count} {name}" for name, count in counts.items())
    console.print(f"figures that differ: {sum(counts.values())}, of these {shares}", markup=False)
    for because in sorted(grouped, key=lambda text: CLASSES.index(class_of(text))):
        titles = (f"Explained. {because}", because, "Not explained")
        title = titles[CLASSES.index(class_of(because))]
        console.print(f"\n{title} ({len(grouped[because])}):", markup=False)
        for line in grouped[because]:
            console.print(f"  {line}", markup=False)
    console.print()


def _cell(cell: Cell) -> str:
    """What names a row: table, data set, method and level."""
    return f"{cell.key[0]} {cell.key[1]} {_name(cell)} {cell.key[4]}".replace("  ", " ")


def _both_marks(cell: Cell) -> str:
    return f"{_MARKS[cell.ours['valid']]} / {_MARKS[cell.paper['valid']] if cell.paper else ''}"


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
