"""What starts the paper's tables on a GPU machine: a process a job, each table in one of them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fullcp.data import drawn_boxes
from fullcp.experiments import boxes
from fullcp.experiments.box_networks import Plan, train_seeds
from fullcp.vision import Recipe, small_backbone

FOLDER = Path(__file__).parent.parent / "benchmarks"


def load(name):
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_table_has_one_process():
    tables = load("tables")
    asked = ("main", "extra", "synthetic_fullcp", "bbox")
    jobs = tables.jobs(asked, ["yacht", "concrete"])
    assert jobs == ["synthetic", "boxes", "yacht", "concrete"]
    made = {job: tables.tables_of(asked, job) for job in jobs}
    assert made == {
        "synthetic": ("synthetic_fullcp",),
        "boxes": ("bbox",),
        "yacht": ("main",),
        "concrete": ("extra",),
    }
    assert tables.jobs(("main",), ["synthetic", "yacht"]) == ["synthetic", "yacht"]
    assert tables.tables_of(("main",), "synthetic") == ("synthetic_fullcp",)
    assert tables.jobs(("main",), ["yacht"]) == ["yacht"]


def test_words_of_the_command_are_handed_on():
    words = ["--tables", "main", "--datasets", "yacht", "10", "--seeds", "10", "--stage=train"]
    left = load("tables").words_without(words, "--datasets")
    assert left == ["--tables", "main", "--seeds", "10", "--stage=train"]


def test_a_process_that_fails_shows_in_the_exit_status(tmp_path):
    (tmp_path / "yacht.txt").write_text("no numbers")
    command = [sys.executable, str(FOLDER / "tables.py"), "--datasets", "yacht", "--tables", "main"]
    where = {**os.environ, "FULLCP_DATA": str(tmp_path)}
    options = ["--stage", "evaluate", "--run-dir", str(tmp_path / "runs")]
    done = subprocess.run([*command, *options], env=where, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1
    assert "failed: yacht" in done.stdout
    done = subprocess.run([*command, "--stage", "all", "--jobs", "2"], env=where, capture_output=True, check=False)
    assert done.returncode == 2


@pytest.mark.filterwarnings("ignore::fullcp.InfiniteIntervalWarning")
def test_boxes_are_evaluated_without_their_pixels(tmp_path, monkeypatch):
    """Through `benchmarks/boxes.py evaluate`; its report is JSON that other readers take too."""
    benchmark = load("boxes")
    data = drawn_boxes(120, size=24, seed=0)
    plan = Plan(frozen=True, recipe=Recipe(epochs=2), trunk=(8, 8), dropout=0.0, pool=4)
    list(train_seeds(data, small_backbone, plan, range(1), tmp_path / "run", device="cpu"))
    monkeypatch.setattr(boxes, "_EPOCHS", 3)
    monkeypatch.setenv("FULLCP_COMMIT", "abc1234")
    monkeypatch.setattr(benchmark, "read", lambda arguments: data)
    monkeypatch.setattr(benchmark, "ProcessPoolExecutor", Here)
    monkeypatch.setattr(sys, "argv", ["boxes.py", "evaluate", "--folder", str(tmp_path / "run"), "--output"])
    sys.argv.append(str(tmp_path / "report.json"))
    benchmark.main()

    def no(word):
        raise AssertionError(f"{word} is no JSON")

    report = json.loads((tmp_path / "report.json").read_text(), parse_constant=no)
    assert report["commit"] == "abc1234"
    assert report["plan"] == plan.facts()
    assert {row["volume"] for row in report["methods"] if row["infinite_share"] == 1} == {"inf"}
    assert {row["volume_se"] for row in report["methods"]} == {None}  # one seed


class Here:
    """Stands for processes; the work is done in this one."""

    def __init__(self, *args, **kwargs):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *args):
        pass

    map = staticmethod(map)
