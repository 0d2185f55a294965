"""Our figures beside the paper's: differences in standard errors, what agrees, and why the rest does not."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from importlib.resources import files
from math import isfinite, nan
from pathlib import Path

from fullcp.experiments.results import read_rows, table_path
from fullcp.experiments.summary import Values

MEASURES = ("width", "coverage")
WIDTH_TOLERANCE = 0.05  # a relative difference of widths that counts as agreement whatever the standard errors
LARGEST = 4.0  # combined standard errors
CLASSES = ("explained", "looked into, not found", "not explained")  # of figures that differ
_ARM = ("table", "dataset", "method", "curvature", "conformity", "calibration")


@dataclass(frozen=True)
class Figure:
    """A mean and its standard error."""

    value: float
    error: float

    @classmethod
    def of(cls, row: Values, name: str) -> Figure:
        """Columns of a row; nan where they are empty."""
        return cls(_number(row[name]), _number(row[f"{name}_se"]))


@dataclass(frozen=True)
class Difference:
    """What we found of something, and what the paper prints.

    Examples
    --------
    >>> found = Difference("width", Figure(10.3, 0.03), Figure(10.0, 0.04))
    >>> round(found.errors, 6), found.relative < 0.05, found.agrees
    (6.0, True, True)
    """

    measure: str
    ours: Figure
    paper: Figure

    @property
    def is_comparable(self) -> bool:
        """Whether both are finite."""
        return isfinite(self.ours.value) and isfinite(self.paper.value)

    @property
    def errors(self) -> float:
        """Ours minus the paper's in combined standard errors; a missing one counts as none."""
        combined = (_or_zero(self.ours.error) ** 2 + _or_zero(self.paper.error) ** 2) ** 0.5
        gap = self.ours.value - self.paper.value
        return gap / combined if combined > 0 else (0.0 if gap == 0 else float("inf") * gap)

    @property
    def relative(self) -> float:
        """Ours minus the paper's, as a share of the paper's."""
        return self.ours.value / self.paper.value - 1

    def within(self, errors: float) -> bool:
        """Whether they are this close in combined standard errors."""
        return abs(self.errors) <= errors

    @property
    def agrees(self) -> bool:
        """Within 4 combined standard errors; widths also within 5 %."""
        return self.within(LARGEST) or (self.measure == "width" and abs(self.relative) <= WIDTH_TOLERANCE)


@dataclass(frozen=True)
class Cell:
    """A row of our table, and the paper's row of the same table, data set, method, curvature and level, if any."""

    ours: Values
    paper: Values | None

    @property
    def key(self) -> tuple[str, ...]:
        """What names it."""
        return _key(self.ours)

    @cached_property
    def differences(self) -> dict[str, Difference]:
        """By measure; none where the paper has no such row."""
        if self.paper is None:
            return {}
        columns = {"width": "size", "coverage": "coverage"}
        return {m: Difference(m, Figure.of(self.ours, c), Figure.of(self.paper, c)) for m, c in columns.items()}


@dataclass(frozen=True)
class Explanation:
    """Why figures differ; patterns as of a shell say which, several of them with | between.

    Texts that begin with "Not found" say what was looked into, and that it was not the reason.
    """

    table: str
    dataset: str
    method: str
    curvature: str
    level: str
    measure: str
    because: str

    def fits(self, cell: Cell, measure: str) -> bool:
        """Whether it is about this figure."""
        patterns = (self.table, self.dataset, self.method, self.curvature, self.level, self.measure)
        values = (*cell.key, measure)
        return all(any(fnmatchcase(v, p) for p in ps.split("|")) for v, ps in zip(values, patterns, strict=True))


def published() -> list[dict[str, str]]:
    """The paper's figures, as they are printed."""
    return _package_rows("published.csv")


def explanations() -> list[Explanation]:
    """What is known of differences."""
    return [Explanation(**row) for row in _package_rows("explanations.csv")]


def compare(rows: Iterable[Values]) -> list[Cell]:
    """Our rows, each with the paper's.

    Own methods and other calibration shares than the paper's have none, nor have networks of other epochs.
    """
    paper = {_key(row): row for row in published()}
    return [Cell(row, None if other_epochs(row) else paper.get(_key(row))) for row in rows]


def other_epochs(row: Values) -> int | None:
    """The epochs of a row whose networks had others than the paper's, as its command says.

    Those of boxes are fine-tuned, by as many epochs as a GPU has time for, and compared all the same.

    Examples
    --------
    >>> other_epochs({"command": "fullcp reproduce --table main --epochs 120 --seeds 1"})
    120
    """
    if row.get("table", "").startswith("bbox"):
        return None
    found = re.search(r"--epochs (\d+)", row.get("command", ""))
    return int(found[1]) if found else None


def evaluation_seconds(rows: Sequence[Values]) -> float:
    """What evaluation took, over all methods, data sets and folds; the levels of a method are evaluated together."""
    once = {tuple(row[name] for name in _ARM): row for row in rows if row["seconds"]}
    return sum(float(row["seconds"]) * int(row["folds"]) for row in once.values())


def read_results(folder: Path, tables: Sequence[str], scaling: str = "training") -> list[dict[str, str]]:
    """All rows of these tables."""
    return [row for table in tables for row in read_rows(table_path(folder, table, scaling))]


def class_of(because: str) -> str:
    """Whether an explanation explains.

    Examples
    --------
    >>> class_of("The authors scale otherwise"), class_of("Not found. It is not the seed"), class_of("")
    ('explained', 'looked into, not found', 'not explained')
    """
    if because.startswith("Not found"):
        return CLASSES[1]
    return CLASSES[0] if because else CLASSES[2]


def explain(cell: Cell, measure: str, known: Sequence[Explanation]) -> str:
    """Why a figure differs, empty where nobody knows."""
    return next((e.because for e in known if e.fits(cell, measure)), "")


@dataclass(frozen=True)
class Agreement:
    """How many figures of a measure agree."""

    comparable: int
    within_2: int
    within_4: int
    agree: int

    @classmethod
    def of(cls, differences: Sequence[Difference]) -> Agreement:
        """Counts over those that can be compared."""
        some = [d for d in differences if d.is_comparable]
        counts = (sum(d.within(2) for d in some), sum(d.within(LARGEST) for d in some), sum(d.agrees for d in some))
        return cls(len(some), *counts)


def differing(cells: Sequence[Cell]) -> list[tuple[Cell, Difference]]:
    """Figures that do not agree, and those of which one side is infinite or not printed and the other is not."""
    return [
        (cell, d)
        for cell in cells
        for d in cell.differences.values()
        if (not d.agrees if d.is_comparable else d.measure == "width" and _is_one_sided(d))
    ]


def differing_marks(cells: Sequence[Cell]) -> list[Cell]:
    """Rows that the paper marks valid and we do not, or the other way round."""
    return [cell for cell in marked(cells) if cell.paper and cell.ours["valid"] != cell.paper["valid"]]


def marked(cells: Sequence[Cell]) -> list[Cell]:
    """Rows that have a mark in the paper."""
    return [cell for cell in cells if cell.paper is not None and cell.paper["valid"]]


def _is_one_sided(d: Difference) -> bool:
    return isfinite(d.ours.value) != isfinite(d.paper.value)


def _key(row: Values) -> tuple[str, ...]:
    return tuple(row[name] for name in ("table", "dataset", "method", "curvature", "level"))


def _package_rows(name: str) -> list[dict[str, str]]:
    text = files("fullcp.experiments").joinpath(name).read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


def _number(text: str) -> float:
    return float(text) if text else nan


def _or_zero(value: float) -> float:
    return value if isfinite(value) else 0.0
