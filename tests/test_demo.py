"""The demo as a stranger runs it, its data, and its picture."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from fullcp import plots
from fullcp.data import Standardizer, halves, load_diabetes, one_dimensional, random_splits
from fullcp.experiments import introduction


def run(*arguments, folder):
    command = [sys.executable, "-m", "fullcp", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)


def test_demo_command(tmp_path):
    done = run("demo", "--splits", "2", "--epochs", "60", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for method in ("ACP-GN", "informed split", "SCP-GN", "SCP", "split + refine", "jackknife+", "LA"):
        assert any(line.split("  ")[0].strip() == method for line in done.stdout.splitlines())
    files = sorted(path.name for path in Path(tmp_path, "demo_output").iterdir())
    assert files == ["diabetes.csv", "figure1.png"]
    with open(tmp_path / "demo_output" / "diabetes.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 7 * 3
    for row in rows:
        assert 0.6 < float(row["coverage"]) <= 1
        assert 50 < float(row["width"]) < 500
    for method in {row["method"] for row in rows}:
        widths = [float(row["width"]) for row in rows if row["method"] == method]
        assert widths == sorted(widths)


def test_command_line_help_and_errors(tmp_path):
    assert run("--version", folder=tmp_path).stdout.startswith("fullcp 0.")
    assert "demo" in run("--help", folder=tmp_path).stdout
    assert run("demo", "--splits", "0", folder=tmp_path).returncode == 2
    (tmp_path / "file").write_text("")
    done = run("demo", "--output", "file", folder=tmp_path)
    assert done.returncode == 2
    assert "file is a file; a folder is wanted" in done.stderr


def test_introduction_tells_a_consistent_story():
    intro = introduction.run(rows=40, epochs=150)
    story = intro.story
    inside = np.any([(low <= story.labels) & (story.labels <= high) for low, high in story.pieces], axis=0)
    away = np.min([np.abs(story.labels - end) for piece in story.pieces for end in piece], axis=0) > 1e-9
    assert np.array_equal(inside[away], (story.p > 0.1 + 1e-12)[away])
    # The staircase is the rank of the pink line among the grey ones, counted from the scores themselves.
    counted = (1 + (story.training >= story.new).sum(0)) / (len(story.training) + 1)
    off_steps = np.min(np.abs(story.labels[:, None] - story.changepoints), axis=1) > 1e-9
    np.testing.assert_allclose(story.p[off_steps], counted[off_steps])
    # Full conformal intervals are wider in the gap than near the data, split ones are not.
    width = (intro.full.upper - intro.full.lower)[:, 0]
    gap, near = np.abs(intro.grid - 0.1).argmin(), np.abs(intro.grid + 2).argmin()
    assert width[gap] > 1.2 * width[near]
    split = (intro.split.upper - intro.split.lower)[:, 0]
    np.testing.assert_allclose(split, split[0])


def test_figure_draws():
    figure = plots.introduction_figure(introduction.run(rows=40, epochs=30))
    FigureCanvasAgg(figure).draw()
    assert len(figure.axes) == 4
    assert [axes.get_xlabel() for axes in figure.axes] == ["", "", "x", "candidate label y"]


def test_widths_against_shares_draw():
    facts = {"width_se": "0.1", "level": "0.9"}
    rows = [
        {"dataset": name, "method": method, "calibration_share": share, "width": 1 + float(share), **facts}
        for name in ("a", "b", "c", "d", "e")
        for method, shares in (("ACP-GN", ["0"]), ("informed split", ["0.25", "0.5"]), ("SCP-GN", ["0.5"]))
        for share in shares
    ]
    figure = plots.width_against_share([*rows, {**rows[0], "level": "0.8", "dataset": "other"}], level=0.9)
    FigureCanvasAgg(figure).draw()
    shown = [axes for axes in figure.axes if axes.axison]
    assert [axes.get_title(loc="left") for axes in shown] == ["a", "b", "c", "d", "e"]
    (rest,) = [axes for axes in figure.axes if not axes.axison]  # holds the names
    names = [text.get_text() for text in rest.get_legend().get_texts()]
    assert sorted(names) == ["ACP-GN (no guarantee)", "SCP-GN", "informed split", "split + refine"]
    informed = shown[1].containers[0].lines[0]
    assert informed.get_xdata().tolist() == [0.25, 0.5]
    assert informed.get_ydata().tolist() == [1.25, 1.5]


def test_data():
    X, y = load_diabetes()
    assert X.shape == (442, 10)
    assert y.shape == (442,)
    scaler = Standardizer.of(X)
    scaled = scaler.transform(X)
    np.testing.assert_allclose(scaled.mean(0), 0, atol=1e-12)
    np.testing.assert_allclose(scaled.std(0), 1)
    np.testing.assert_allclose(scaler.inverse(scaled), X)
    constant = Standardizer.of(np.full((100, 2), 0.1))
    np.testing.assert_allclose(constant.transform([[0.1, 0.2]]), [[0.0, 0.1]], atol=1e-12)
    x, t = one_dimensional(50)
    assert x.shape == (50, 1)
    assert not ((x > -1) & (x < 1.2)).any()


def test_splits():
    first = list(random_splits(100, 3, test_share=0.2, seed=4))
    again = list(random_splits(100, 5, test_share=0.2, seed=4))[:3]
    for (train, test), (train2, test2) in zip(first, again):
        assert np.array_equal(train, train2)
        assert np.array_equal(test, test2)
        assert len(test) == 20
        assert sorted([*train, *test]) == list(range(100))
    fit, cal = halves(first[0][0], share=0.25)
    assert (len(fit), len(cal)) == (60, 20)
    with pytest.raises(ValueError, match="share must lie between 0 and 1"):
        halves(fit, share=1.0)
    with pytest.raises(ValueError, match="test_share must lie between 0 and 1"):
        next(random_splits(10, 1, test_share=0.0))
