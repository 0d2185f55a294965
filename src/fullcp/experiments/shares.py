"""Width and coverage against the share of the training part that calibrates, from the table of that name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fullcp.experiments.protocol import LEVELS
from fullcp.experiments.summary import Values


@dataclass(frozen=True)
class Curve:
    """A method at one level: shares in per cent, mean widths, coverage in per cent, and their standard errors.

    Methods that hold nothing out have the single share 0.
    """

    method: str
    level: float
    shares: list[int]
    sizes: list[float]
    size_errors: list[float]
    coverage: list[float]
    coverage_errors: list[float]


def curves(rows: Sequence[Values], dataset: str) -> list[Curve]:
    """The curves of a data set, from rows of `results/calibration_share.csv`."""
    found = []
    own = [row for row in rows if row["dataset"] == dataset]
    for level in LEVELS:
        for method in dict.fromkeys(row["method"] for row in own):
            points = [r for r in own if r["method"] == method and float(r["level"]) == round(100 * level)]
            points = sorted(points, key=lambda r: int(r["calibration"]))
            if points:
                columns = [
                    [float(r[c] or "nan") for r in points] for c in ("size", "size_se", "coverage", "coverage_se")
                ]
                found.append(Curve(method, level, [int(r["calibration"]) for r in points], *columns))
    return found
