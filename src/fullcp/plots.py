"""Pictures. Each function draws on matplotlib axes that it is given; nothing here computes a result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, ORANGE, PINK, GREY, GREEN = "#2b6cb0", "#dd8452", "#d6336c", "#8a8f98", "#2f9e44"
RED = "#e03131"


def intervals_over_inputs(axes: Axes, x: Any, result: Any, *, color: str, label: str, filled: bool = False) -> None:
    """An interval for each of the ordered inputs x (n,), from a result of `predict_interval` with one level."""
    lower, upper = np.asarray(result.lower)[:, 0], np.asarray(result.upper)[:, 0]
    if filled:
        axes.fill_between(x, lower, upper, color=color, alpha=0.22, linewidth=0, label=label)
    else:
        axes.plot(x, lower, color=color, linewidth=1.5, label=label)
        axes.plot(x, upper, color=color, linewidth=1.5)


def score_lines(axes: Axes, labels: Any, training: Any, new: Any) -> None:
    """Scores of the training points (N, K) and of the new one (K,) against its candidate labels (K,)."""
    for i, row in enumerate(np.asarray(training)):
        axes.plot(labels, row, color=GREY, linewidth=0.9, alpha=0.8, label="training points" if i == 0 else None)
    axes.plot(labels, new, color=PINK, linewidth=2, label="test point")


def crossings(axes: Axes, labels: Any, new: Any, changepoints: Any) -> None:
    """Dots where the test point's score meets a training point's."""
    inside = np.asarray([c for c in changepoints if labels[0] <= c <= labels[-1]])
    axes.scatter(inside, np.interp(inside, labels, new), s=16, color=PINK, edgecolor="white", linewidth=0.6, zorder=3)


def p_value_staircase(axes: Axes, labels: Any, p: Any, alpha: float, pieces: Any) -> None:
    """The p-value of each label, the threshold alpha, and the set of labels above it."""
    axes.plot(labels, p, color=BLUE, linewidth=1.5, drawstyle="steps-mid", label="p-value")
    axes.axhline(alpha, color=ORANGE, linewidth=1.2, linestyle="--", label=rf"$\alpha$ = {alpha:g}")
    for i, (low, high) in enumerate(pieces):
        axes.axvspan(low, high, color=GREEN, alpha=0.14, linewidth=0, label="prediction set" if i == 0 else None)


def introduction_figure(intro: Any) -> Any:
    """The paper's first figure from an `experiments.introduction.Introduction`; returns a matplotlib figure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6.4), layout="constrained")
    grid = figure.subplots(2, 2, sharex="col")
    percent = f"{intro.level:.0%}"
    prediction = np.asarray(intro.full.prediction)

    top, bottom = grid[:, 0]
    intervals_over_inputs(top, intro.grid, intro.full, color=BLUE, label="full conformal (ACP-GN)", filled=True)
    intervals_over_inputs(top, intro.grid, intro.split, color=ORANGE, label="split conformal (SCP)")
    top.set_title(f"{percent} intervals: narrow near data, wide away from it", loc="left", fontsize=10)
    intervals_over_inputs(bottom, intro.grid, intro.full, color=BLUE, label="full conformal (ACP-GN)", filled=True)
    intervals_over_inputs(bottom, intro.grid, intro.laplace, color=GREEN, label="Laplace (LA)")
    bottom.set_title("They adapt as Bayesian intervals do", loc="left", fontsize=10)
    for axes in (top, bottom):
        axes.plot(intro.grid, prediction, color="black", linewidth=1)
        axes.scatter(intro.x, intro.y, s=18, color="white", edgecolor="black", linewidth=0.8, zorder=3)
        axes.set_ylabel("y")
        spread = np.ptp(intro.y)
        axes.set_ylim(intro.y.min() - 0.7 * spread, intro.y.max() + 0.7 * spread)
    top.axvline(intro.story.x, color=PINK, linewidth=1, linestyle=":")
    bottom.set_xlabel("x")

    lines, stairs = grid[:, 1]
    story = intro.story
    score_lines(lines, story.labels, story.training, story.new)
    crossings(lines, story.labels, story.new, story.changepoints)
    lines.set_ylim(0, 1.05 * story.new.max())
    lines.set_ylabel("nonconformity score")
    lines.set_title(
        f"Scores at x = {story.x:g} are lines in the label ({len(story.training)} rows)", loc="left", fontsize=10
    )
    p_value_staircase(stairs, story.labels, story.p, 1 - intro.level, story.pieces)
    stairs.set_title("The p-value changes where the pink line meets a grey one", loc="left", fontsize=10)
    stairs.set_ylabel("p-value")
    stairs.set_xlabel("candidate label y")
    for axes in grid.flat:
        axes.spines[["top", "right"]].set_visible(False)
        places = {lines: "upper center", stairs: "upper right"}
        axes.legend(fontsize=8, frameon=False, loc=places.get(axes, "lower left"))
    return figure


def width_against_share(rows: Any, *, level: float) -> Any:
    """Mean width against the share of rows that calibrate, a panel a set; returns a matplotlib figure.

    Parameters
    ----------
    rows : dicts with dataset, method, calibration_share (0 for methods that hold nothing out), level, width, width_se
        As `benchmarks/informed.py` writes them; numbers may be text.
    """
    from matplotlib.figure import Figure

    rows = [row for row in rows if float(row["level"]) == level]
    sets = list(dict.fromkeys(row["dataset"] for row in rows))
    columns = min(4 if len(sets) in (4, 7, 8) else 3, len(sets))
    figure = Figure(figsize=(3.1 * columns, 2.9 * -(-len(sets) // columns) + 0.4), layout="constrained")
    panels = np.atleast_1d(figure.subplots(-(-len(sets) // columns), columns)).ravel()
    styles = {"informed split": (BLUE, "o"), "SCP-GN": (ORANGE, "s"), "split + refine": (GREEN, "^")}
    for axes, name in zip(panels, sets, strict=False):
        for method, (color, marker) in styles.items():
            found = [row for row in rows if row["dataset"] == name and row["method"] == method]
            found.sort(key=lambda row: float(row["calibration_share"]))
            share, width, error = (
                [float(row[key]) for row in found] for key in ("calibration_share", "width", "width_se")
            )
            axes.errorbar(share, width, error, color=color, marker=marker, markersize=4, linewidth=1.3, label=method)
        full = next(row for row in rows if row["dataset"] == name and row["method"] == "ACP-GN")
        axes.axhline(float(full["width"]), color=GREY, linestyle="--", linewidth=1.2, label="ACP-GN (no guarantee)")
        shown = [float(row["width"]) for row in rows if row["dataset"] == name and row["method"] != "split + refine"]
        axes.set_ylim(0.9 * min(shown), 1.15 * max(shown))  # split + refine on few rows is off any scale
        axes.set_title(name, loc="left", fontsize=10)
        axes.set_xlabel("calibration share")
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels[len(sets) :]:
        axes.set_axis_off()
    panels[0].set_ylabel(f"mean width at {level:.0%}")
    names = panels[0].get_legend_handles_labels()
    if len(panels) > len(sets):  # a panel of its own
        panels[len(sets)].legend(*names, loc="center", fontsize=9, frameon=False)
    else:
        panels[0].legend(*names, fontsize=7, frameon=False)
    return figure


def curve_over_shares(axes: Axes, shares: Any, values: Any, errors: Any, *, color: str, label: str | None) -> None:
    """Means with error bars against calibration shares in per cent; the single share 0 is a line across."""
    if list(shares) == [0]:
        axes.axhline(values[0], color=color, linewidth=1.4, linestyle="--", label=label)
    else:
        bars = np.nan_to_num(np.asarray(errors, dtype=float))
        axes.errorbar(shares, values, yerr=bars, color=color, marker="o", markersize=3.5, capsize=2, label=label)


def shares_figure(curves: Any, dataset: str) -> Any:
    """Widths (left) and coverage (right) of `experiments.shares.Curve`s, a row a level; returns a matplotlib figure."""
    from matplotlib.figure import Figure

    levels = list(dict.fromkeys(curve.level for curve in curves))
    methods = list(dict.fromkeys(curve.method for curve in curves))
    colors = dict(zip(methods, (BLUE, ORANGE, GREEN, PINK, GREY), strict=False))
    figure = Figure(figsize=(9, 2.5 * len(levels) + 0.5), layout="constrained")
    grid = figure.subplots(len(levels), 2, sharex=True, squeeze=False)
    for (left, right), level in zip(grid, levels, strict=True):
        for curve in (curve for curve in curves if curve.level == level):
            look = {"color": colors[curve.method], "label": curve.method}
            curve_over_shares(left, curve.shares, curve.sizes, curve.size_errors, **look)
            curve_over_shares(right, curve.shares, curve.coverage, curve.coverage_errors, **look)
        right.axhline(100 * level, color=GREY, linewidth=0.8, linestyle=":")
        left.set_ylabel(f"width at {level:.0%}")
        right.set_ylabel("coverage (%)")
        for axes in (left, right):
            axes.spines[["top", "right"]].set_visible(False)
    grid[0, 0].set_title(f"{dataset}: what calibration rows cost", loc="left", fontsize=10)
    grid[0, 0].legend(fontsize=8, frameon=False)
    for axes in grid[-1]:
        axes.set_xlabel("share of the training part that calibrates (%)")
    return figure


def box_region(axes: Axes, image: Any, box: Any, region: Any, truth: Any = None) -> None:
    """An image (3, S, S), the predicted box in red and its two-sided region in green.

    Parameters
    ----------
    box, truth : left, top, right and bottom, as shares of the image's sides; the true box is dashed.
    region : (2, 4), lower and upper ends of each. The region lies between the largest box and the smallest.
    """
    from matplotlib.patches import PathPatch, Rectangle
    from matplotlib.path import Path

    axes.imshow(np.moveaxis(np.asarray(image), 0, -1), extent=(0, 1, 1, 0), interpolation="nearest")
    lower, upper = np.clip(np.asarray(region, dtype=float), -1, 2)
    outer, inner = (*lower[:2], *upper[2:]), (*upper[:2], *lower[2:])
    pieces = [_corners(outer)]
    if inner[0] < inner[2] and inner[1] < inner[3]:
        pieces.append(_corners(inner)[::-1])  # the other way round, so that it is a hole
    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY]
    vertices = np.concatenate([[*piece, piece[0]] for piece in pieces])
    path = Path(vertices, codes * len(pieces))
    axes.add_patch(PathPatch(path, facecolor=GREEN, alpha=0.35, edgecolor="none"))
    axes.add_patch(PathPatch(path, facecolor="none", edgecolor=GREEN, linewidth=1.2))
    for edges, color, style in ((box, RED, "-"), (truth, "white", "--")):
        if edges is not None:
            left, top, right, bottom = (float(edge) for edge in edges)
            axes.add_patch(
                Rectangle((left, top), right - left, bottom - top, fill=False, edgecolor=color, ls=style, lw=1.6)
            )
    axes.set(xlim=(0, 1), ylim=(1, 0), xticks=[], yticks=[])


def _corners(edges: Any) -> list[tuple[float, float]]:
    left, top, right, bottom = edges
    return [(left, top), (right, top), (right, bottom), (left, bottom)]


def box_methods_figure(images: Any, view: Any, *, rows: int = 3, methods: Any = None) -> Any:
    """Typical test images, one a row, with each method's region, one a column; returns a matplotlib figure.

    Parameters
    ----------
    images : all images (n, 3, S, S).
    view : an `experiments.box_views.View`.
    methods : their names, in the order of the columns; None takes all.
    """
    from matplotlib.figure import Figure

    methods = list(methods or view.regions)
    figure = Figure(figsize=(2.1 * len(methods), 2.25 * rows + 0.4), layout="constrained")
    grid = figure.subplots(rows, len(methods), squeeze=False)
    # From quarter to quarter of the order of overlaps: neither the best nor the worst.
    order = view.overlaps(methods[0]).argsort(stable=True).tolist()
    picks = [order[len(order) * (i + 1) // (rows + 1)] for i in range(rows)]
    for i, pick in enumerate(picks):
        for j, method in enumerate(methods):
            axes = grid[i, j]
            box_region(
                axes, images[view.rows[pick]], view.boxes[method][pick], view.regions[method][pick], view.truth[pick]
            )
            if i == 0:
                axes.set_title(method.replace(" (", "\n("), fontsize=9)
    _box_legend(figure, view.level)
    return figure


def box_cases_figure(images: Any, view: Any, method: str, *, count: int = 6) -> Any:
    """The best, typical and worst boxes of a method by their overlap with the truth; returns a matplotlib figure."""
    from matplotlib.figure import Figure

    count = min(count, len(view.rows) // 3)
    figure = Figure(figsize=(1.9 * count, 6.6), layout="constrained")
    grid = figure.subplots(3, count, squeeze=False)
    overlaps = view.overlaps(method)
    for axes_row, name, picks in zip(
        grid, ("best", "typical", "worst"), view.best_typical_worst(method, count), strict=True
    ):
        for axes, pick in zip(axes_row, picks, strict=True):
            region, truth = view.regions[method][pick], view.truth[pick]
            box_region(axes, images[view.rows[pick]], view.boxes[method][pick], region, truth)
            covered = bool(((region[0] <= truth) & (truth <= region[1])).all())
            axes.set_title(f"overlap {overlaps[pick]:.2f}{'' if covered else ', missed'}", fontsize=8)
        axes_row[0].set_ylabel(name, fontsize=10)
    figure.suptitle(method, fontsize=10)
    _box_legend(figure, view.level)
    return figure


def _box_legend(figure: Any, level: float) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles = [
        Line2D([], [], color=RED, label="prediction"),
        Patch(facecolor=GREEN, alpha=0.35, edgecolor=GREEN, label=f"{level:.0%} region"),
        Line2D([], [], color="grey", linestyle="--", label="truth (white)"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
