"""What the paper says of its tables, asked of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf, isfinite

from fullcp.experiments.summary import Values

PAPER_METHODS = ("LA", "SCP", "CRF", "CQR", "ACP-GN", "SCP-GN", "ACP-GN (split + refine)")


@dataclass(frozen=True)
class Verdict:
    """A claim, whether it holds, and the numbers that say so."""

    claim: str
    holds: bool
    numbers: str


def check_claims(rows: Sequence[Values]) -> list[Verdict]:
    """The claims that these rows can decide."""
    found: list[Verdict] = []
    for check in _CHECKS:
        found += check(rows)
    return found


def _narrowest_on_few_rows(rows: Sequence[Values]) -> Iterable[Verdict]:
    """Main text: ACP-GN gives the tightest intervals in limited-data regimes."""
    for dataset in ("yacht", "boston", "energy"):
        own = [r for r in _of(rows, "main", dataset, "90") if r["method"] in PAPER_METHODS and not r["curvature"]]
        widths = {r["method"]: _width(r) for r in own if r["valid"] == "yes"}
        if "ACP-GN" in {r["method"] for r in own}:
            best = min(widths, key=lambda m: widths[m], default="none")
            numbers = ", ".join(f"{m} {w:.4g}" for m, w in sorted(widths.items(), key=lambda item: item[1])[:3])
            claim = f"ACP-GN is the narrowest of the paper's valid methods on {dataset} at 90 %"
            yield Verdict(claim, best == "ACP-GN", numbers)


def _refinement_restores_validity(rows: Sequence[Values]) -> Iterable[Verdict]:
    """Main text: split + refine generally gives the correct coverage where ACP-GN does not."""
    marks = [{method: row["valid"] for method, row in own.items()} for own in _side_by_side(rows)]
    both = [own for own in marks if "ACP-GN" in own and "ACP-GN (split + refine)" in own]
    missed = [own for own in both if own["ACP-GN"] == "no"]
    if missed:
        kept = sum(own["ACP-GN (split + refine)"] == "yes" for own in missed)
        claim = "split + refine is valid where ACP-GN is not (most cells, half calibrates)"
        yield Verdict(claim, 2 * kept > len(missed), f"{kept} of {len(missed)}")


def _leverage_beats_residual_fit(rows: Sequence[Values]) -> Iterable[Verdict]:
    """Main text: SCP-GN improves over CRF for most data sets and levels."""
    widths = [{method: _width(row) for method, row in own.items()} for own in _side_by_side(rows)]
    both = [own for own in widths if isfinite(own.get("CRF", inf)) and isfinite(own.get("SCP-GN", inf))]
    if both:
        narrower = sum(own["SCP-GN"] < own["CRF"] for own in both)
        claim = "SCP-GN is narrower than CRF on most sets and levels (half calibrates)"
        yield Verdict(claim, 2 * narrower > len(both), f"{narrower} of {len(both)}")


def _ordering_on_synthetic(rows: Sequence[Values]) -> Iterable[Verdict]:
    """Appendix: FCP is the most efficient, then ACP, then ACP-GN."""
    for level in ("90", "95", "99"):
        widths = {r["method"]: _width(r) for r in rows if r["table"] == "synthetic_fullcp" and r["level"] == level}
        order = ("FCP", "ACP", "ACP-GN")
        if all(m in widths for m in order):
            numbers = ", ".join(f"{m} {widths[m]:.4g}" for m in order)
            holds = widths["FCP"] <= widths["ACP"] <= widths["ACP-GN"]
            yield Verdict(f"FCP, ACP, ACP-GN from narrow to wide on synthetic data at {level} %", holds, numbers)


def _order_of_boxes(rows: Sequence[Values]) -> Iterable[Verdict]:
    """Main text: split + refine and ACP-GN give the smallest volumes, and SCP-GN improves over SCP."""
    for table in dict.fromkeys(r["table"] for r in rows if r["table"].startswith("bbox")):
        own = {r["method"]: r for r in _of(rows, table, "", "90")}
        sizes = {m: _width(own[m]) for m in PAPER_METHODS if m in own}
        if len(sizes) == len(PAPER_METHODS):
            order = sorted(sizes, key=lambda m: sizes[m])
            numbers = ", ".join(f"{m} {sizes[m]:.4g}" for m in order)
            best = {"ACP-GN", "ACP-GN (split + refine)"}
            yield Verdict(
                f"{table}: smallest volumes by ACP-GN and split + refine at 90 %", set(order[:2]) == best, numbers
            )
            yield Verdict(f"{table}: SCP-GN below SCP at 90 %", sizes["SCP-GN"] < sizes["SCP"], numbers)


_CHECKS: tuple[Callable[[Sequence[Values]], Iterable[Verdict]], ...] = (
    _narrowest_on_few_rows,
    _refinement_restores_validity,
    _leverage_beats_residual_fit,
    _ordering_on_synthetic,
    _order_of_boxes,
)


def _side_by_side(rows: Sequence[Values]) -> list[dict[str, Values]]:
    """Method -> row, for each data set and level of the tables where half calibrates."""
    found: dict[tuple[str, str], dict[str, Values]] = {}
    for row in rows:
        if row["table"] in ("main", "extra") and not row["curvature"]:
            found.setdefault((row["dataset"], row["level"]), {})[row["method"]] = row
    return list(found.values())


def _of(rows: Sequence[Values], table: str, dataset: str, level: str) -> list[Values]:
    return [r for r in rows if (r["table"], r["dataset"], r["level"]) == (table, dataset, level)]


def _width(row: Values) -> float:
    return float(row["size"]) if row["size"] else inf
