"""From lines a fold to rows of a table: means over repeats, standard errors, validity."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fullcp.evaluation import validity_band
from fullcp.experiments.protocol import LEVELS

Values = Mapping[str, str]  # a line of a file


@dataclass(frozen=True)
class Mean:
    """A mean over repeats, and its standard error: over folds where there is one repeat; nan for infinite means."""

    value: float
    error: float
    repeats: int

    @classmethod
    def of(cls, values: Sequence[float], repeats: Sequence[int]) -> Mean:
        """The mean of the means of repeats: folds of a repeat share their rows, repeats are independent.

        Examples
        --------
        >>> mean = Mean.of([1.0, 3.0, 4.0, 6.0], [0, 0, 1, 1])
        >>> mean.value, round(mean.error, 9), mean.repeats
        (3.5, 1.5, 2)
        """
        groups: dict[int, list[float]] = defaultdict(list)
        for value, repeat in zip(values, repeats, strict=True):
            groups[repeat].append(value)
        means = np.array([np.mean(group) for group in groups.values()])
        spread = means if len(means) > 1 else np.asarray(values)
        known = len(spread) > 1 and bool(np.isfinite(spread).all())
        error = float(spread.std(ddof=1) / len(spread) ** 0.5) if known else float("nan")
        return cls(float(means.mean()), error, len(means))


def seeds_in_words(seeds: Iterable[int]) -> str:
    """Which seeds there are, as a range where none is left out between the first and the last.

    Examples
    --------
    >>> seeds_in_words([0, 1, 2, 2]), seeds_in_words([3, 0, 2]), seeds_in_words([5])
    ('0 to 2', '0, 2, 3', '5')
    """
    found = sorted(set(seeds))
    if len(found) > 1 and found[-1] - found[0] == len(found) - 1:
        return f"{found[0]} to {found[-1]}"
    return ", ".join(map(str, found))


def is_valid(coverage: float, rows: int, level: float) -> bool:
    """The paper's mark: mean coverage within the 1 and 99 % quantiles of what `rows` calibrating rows promise.

    Examples
    --------
    >>> is_valid(0.8736, 277, 0.9), is_valid(0.9078, 277, 0.95)
    (True, False)
    """
    low, high = validity_band(rows, level)
    return low <= coverage <= high


def summarise(lines: Sequence[Values]) -> list[dict[str, object]]:
    """A row a level of one method on one data set; sizes are mean widths, coverage is in per cent."""
    found: list[dict[str, object]] = []
    for level in LEVELS:
        own = [line for line in lines if float(line["level"]) == level]
        if not own:
            continue
        repeats = [int(line["repeat"]) for line in own]

        def mean(column: str, own: Sequence[Values] = own, repeats: Sequence[int] = repeats) -> Mean:
            return Mean.of([float(line[column]) for line in own], repeats)

        width, coverage, seconds = mean("width"), mean("coverage"), mean("seconds")
        rows = round(float(np.mean([int(line["rows"]) for line in own])))
        found.append(
            {
                "level": f"{100 * level:g}",
                "size": _text(width.value, 6),
                "size_se": _text(width.error, 3),
                "coverage": f"{100 * coverage.value:.3f}",
                "coverage_se": _text(100 * coverage.error, 3),
                "valid": "yes" if is_valid(coverage.value, rows, level) else "no",
                "infinite": f"{mean('infinite').value:.4g}",
                "score": _text(mean("score").value, 6),
                "rows": rows,
                "repeats": width.repeats,
                "folds": len(own),
                "seeds": seeds_in_words(repeats),
                "seconds": _text(seconds.value, 4),
                "seconds_se": _text(seconds.error, 3),
                "device": " + ".join(dict.fromkeys(line["device"] for line in own)),
                "commit": " + ".join(dict.fromkeys(line["commit"] for line in own)),
            }
        )
    return found


def _text(value: float, digits: int) -> str:
    """A number as it stands in a file; empty where there is none."""
    return "" if value != value else f"{value:.{digits}g}"
