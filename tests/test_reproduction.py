"""The paper's tables end to end, small: trained, evaluated, interrupted, written, compared."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from typer.testing import CliRunner

from fullcp.commands import app
from fullcp.data import DATASETS, Standardizer, Table
from fullcp.experiments import introduction, reproduction, synthetic, uci_evaluation
from fullcp.experiments.authors_scaling import scaled_fold
from fullcp.experiments.lines import LineFile
from fullcp.experiments.protocol import folds_of, protocol_of
from fullcp.experiments.results import COLUMNS, read_rows
from fullcp.experiments.tables import SPECS, TABLES
from fullcp.experiments.uci_methods import METHODS

ROWS = 60
UNTIMED = ("seconds", "seconds_se", "commit", "command")


def ask(folder, **changes):
    given = {
        "tables": ("main",),
        "datasets": ("yacht",),
        "methods": None,
        "seeds": 1,
        "epochs": 120,
        "device": "cpu",
        "stage": "all",
        "run_dir": folder / "run",
        "output": folder / "results",
        "memory": "1GB",
    }
    said = []
    reproduction.run(reproduction.Request(**{**given, **changes}), said.append)
    return said


def known(rows):
    return [{name: value for name, value in row.items() if name not in UNTIMED} for row in rows]


@pytest.fixture
def small_yacht(tmp_path, monkeypatch):
    """A data set of a few rows under the name of yacht, with three folds."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(ROWS, 2))
    values = np.column_stack([X, X[:, 0] + 0.3 * rng.normal(size=ROWS)])
    (tmp_path / "yacht.txt").write_text("\n".join(" ".join(str(v) for v in row) for row in values))
    monkeypatch.setenv("FULLCP_DATA", str(tmp_path))
    monkeypatch.setitem(DATASETS, "yacht", replace(DATASETS["yacht"], rows=ROWS, inputs=2, digest=None))
    short = replace(protocol_of("yacht"), folds=3)

    def protocol(name, *, repeats=None, epochs=None):
        return replace(short, repeats=repeats or short.repeats, epochs=epochs or short.epochs)

    monkeypatch.setattr(reproduction, "protocol_of", protocol)
    return tmp_path


def test_interrupted_runs_give_the_same_rows(small_yacht, monkeypatch):
    whole, broken = small_yacht / "whole", small_yacht / "broken"
    ask(whole, seeds=2)
    expected = read_rows(whole / "results" / "main.csv")
    # Networks of one repeat, then of the other; evaluation stops in the middle, and a write is cut off
    ask(broken, seeds=2, stage="train")
    real, left = uci_evaluation.measure, [11]

    def breaking(*args, **kwargs):
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(uci_evaluation, "measure", breaking)
    with pytest.raises(KeyboardInterrupt):
        ask(broken, seeds=2, stage="evaluate")
    monkeypatch.setattr(uci_evaluation, "measure", real)
    lines = broken / "run" / "yacht" / "folds.csv"
    with lines.open("a") as file:
        file.write("1,0,LA|full||0,0.9,40,20,0.1")
    ask(broken, seeds=2)
    found = read_rows(broken / "results" / "main.csv")
    assert known(found) == known(expected)
    assert len(lines.read_text()) > 0
    done = [(r["fold"], r["method"], r["level"]) for r in uci_evaluation.line_file(broken / "run", "yacht").read()]
    assert len(done) == len(set(done)) == 3 * 6 * len(TABLES["main"].chosen())


def test_rows_of_more_repeats_are_not_lost(small_yacht):
    ask(small_yacht, seeds=2, methods=("LA", "SCP"))
    path = small_yacht / "results" / "main.csv"
    before = path.read_text()
    message = r"output: .*main.csv has 2 repeat\(s\) of yacht, and 1 with other epochs .* place: name another folder"
    with pytest.raises(ValueError, match=message):
        ask(small_yacht, seeds=1, methods=("CRF",), run_dir=small_yacht / "other")
    assert not (small_yacht / "other").exists()  # refused before anything was trained
    assert path.read_text() == before
    path.write_text(before.replace(" --epochs 120", ""))
    with pytest.raises(ValueError, match="and 2 with other epochs than the paper has would take their place"):
        ask(small_yacht, seeds=2)
    # Other methods join those that are there, in the order of the table.
    path.write_text(before)
    ask(small_yacht, seeds=2, methods=("SCP", "ACP-GN", "CRF"))
    assert [row["method"] for row in read_rows(path)[::3]] == ["LA", "SCP", "CRF", "ACP-GN"]
    with pytest.raises(FileNotFoundError, match="the networks of fold 6 are missing: run the training stage for it"):
        ask(small_yacht, seeds=3, stage="evaluate", methods=("LA",))


def test_rows_say_where_they_come_from(small_yacht):
    ask(small_yacht, seeds=2)
    rows = read_rows(small_yacht / "results" / "main.csv")
    arms = TABLES["main"].chosen()
    assert [(r["method"], r["calibration"]) for r in rows[::3]] == [(arm.method, str(arm.share)) for arm in arms]
    for row in rows:
        assert (row["repeats"], row["folds"], row["seeds"], row["n"], row["inputs"]) == ("2", "6", "0 to 1", "60", "2")
        assert row["command"] == "fullcp reproduce --table main --datasets yacht --epochs 120 --seeds 2"
        assert row["device"].startswith("cpu")
        assert row["commit"]
        assert float(row["infinite"]) == (1 if row["size"] == "inf" else 0)
    split = next(r for r in rows if r["method"] == "SCP" and r["level"] == "99")
    assert (split["size"], split["size_se"], split["infinite"], split["rows"]) == ("inf", "", "1", "20")
    with open(small_yacht / "results" / "training.csv") as file:
        training = list(csv.DictReader(file))
    assert {r["stage"] for r in training} == {"tuned", "fixed"}
    tuned = next(r for r in training if r["stage"] == "tuned")
    assert float(tuned["seconds"]) > 0
    assert int(tuned["networks"]) == 6 * len(tuned["roles"].split())


def test_what_is_written_is_what_was_trained(small_yacht):
    ask(small_yacht, stage="train", seeds=3, methods=("LA",))
    ask(small_yacht, stage="evaluate", seeds=3, methods=("LA",))
    with pytest.raises(ValueError, match=r"holds networks trained otherwise \(epochs=120\)"):
        ask(small_yacht, stage="write", seeds=3, methods=("LA",), epochs=None)
    assert not (small_yacht / "results").exists()
    # A repeat whose folds are gone is not among the seeds.
    lines = small_yacht / "run" / "yacht" / "folds.csv"
    kept = [line for line in lines.read_text().splitlines() if line.split(",")[1:2] != ["1"]]
    lines.write_text("\n".join(kept) + "\n")
    ask(small_yacht, stage="write", seeds=3, methods=("LA",))
    rows = read_rows(small_yacht / "results" / "main.csv")
    assert {(r["repeats"], r["seeds"]) for r in rows} == {("2", "0, 2")}
    assert rows[0]["command"].endswith("--seeds 3")


def test_nothing_is_written_of_nothing(small_yacht):
    assert ask(small_yacht, stage="write") == ["main: nothing is evaluated of yacht yet"]
    assert not (small_yacht / "results").exists()


def test_other_data_sets_stay_in_a_table(small_yacht):
    path = small_yacht / "results" / "main.csv"
    ask(small_yacht, methods=("LA",))
    first = read_rows(path)
    other = [{**row, "dataset": "bike"} for row in first]
    from fullcp.report import write_csv

    write_csv(path, [*other, *first])
    ask(small_yacht, methods=("LA", "SCP"))
    rows = read_rows(path)
    assert [r["dataset"] for r in rows] == ["yacht"] * 6 + ["bike"] * 3
    assert list(rows[0]) == list(COLUMNS)


def test_networks_of_more_repeats_join_those_that_are_there(small_yacht):
    ask(small_yacht, stage="train")
    before = (small_yacht / "run" / "yacht" / "full.safetensors").stat().st_size
    ask(small_yacht, stage="train", seeds=2)
    assert (small_yacht / "run" / "yacht" / "full.safetensors").stat().st_size > 1.5 * before
    with pytest.raises(ValueError, match="holds networks trained otherwise \\(epochs=120\\)"):
        ask(small_yacht, stage="train", epochs=130)


def test_bad_requests(small_yacht):
    with pytest.raises(ValueError, match="table must be"):
        ask(small_yacht, tables=("mains",))
    with pytest.raises(ValueError, match="kin8nm is in no table of main"):
        ask(small_yacht, datasets=("kin8nm",))
    with pytest.raises(ValueError, match="methods must be"):
        ask(small_yacht, methods=("ACPGN",))
    with pytest.raises(ValueError, match="scaling must be"):
        ask(small_yacht, scaling="theirs")
    with pytest.raises(ValueError, match="device must be"):
        ask(small_yacht, device="tpus")
    with pytest.raises(FileNotFoundError, match=r"full\.safetensors is missing: run the training stage first"):
        ask(small_yacht, stage="evaluate")


def test_a_missing_data_set_is_reported_and_left_out(tmp_path, monkeypatch):
    monkeypatch.delenv("FULLCP_DATA", raising=False)
    monkeypatch.setenv("FULLCP_CACHE", str(tmp_path))
    for name in TABLES["main"].datasets:
        monkeypatch.setitem(DATASETS, name, replace(DATASETS[name], urls=()))
    said = ask(tmp_path, datasets=None)
    assert [line.split()[0] for line in said] == list(TABLES["main"].datasets)
    assert all("is left out" in line for line in said)
    with pytest.raises(OSError, match="FULLCP_DATA"):
        ask(tmp_path, datasets=("yacht",))


def test_every_arm_has_its_method():
    for spec in SPECS.values():
        assert spec.datasets
        for arm in spec.arms:
            assert arm.method in METHODS
            assert len(arm.roles()) == len(METHODS[arm.method].networks)
    for spec in TABLES.values():
        own = [(arm.method, arm.share) for arm in spec.arms if arm.curvature == "full"]
        assert {("informed", 25), ("informed", 50), ("jackknife+", 0)} <= set(own)


def test_line_file_keeps_whole_groups_only(tmp_path):
    file = LineFile(tmp_path / "a" / "lines.csv", ("k", "v"))
    assert file.read() == []
    file.append([{"k": 1, "v": "x"}, {"k": 2, "v": "y"}])
    text = file.path.read_text()
    for cut in range(1, 8):
        file.path.write_text(text + "3,zzzzz"[:cut])
        assert [line["k"] for line in file.read()] == ["1", "2"]
    file.append([{"k": 3, "v": "z"}])
    assert [line["v"] for line in file.read()] == ["x", "y", "z"]
    with pytest.raises(ValueError, match="has other columns"):
        LineFile(file.path, ("k", "w")).read()


def test_the_authors_scaling_by_hand():
    rng = np.random.default_rng(0)
    table = Table("t", rng.normal(2, 3, size=(100, 2)), rng.normal(5, 2, size=100), ("a", "b"), "y")
    fold = folds_of(protocol_of("yacht", repeats=1), 100)[0]
    right, wrong = scaled_fold(table, fold, "training"), scaled_fold(table, fold, "authors")
    np.testing.assert_array_equal(right.y, (table.y - table.y[fold.train].mean()) / table.y[fold.train].std())
    for share in (0, 50, 25):
        X, y = wrong.unseen(fold.test, share)
        own = fold.parts(share)[0] if share else fold.train
        # In units of the rows that train a network, both are affine in the raw values; theirs has other constants
        ours, theirs = (np.polyfit(table.y[fold.test], v, 1) for v in (right.y[fold.test], y))
        assert not np.allclose(ours, theirs)
        np.testing.assert_allclose(np.polyval(theirs, table.y[fold.test]), y)
        mean, scale = table.y[own].mean(), table.y[own].std()
        back = y * table.y[fold.train].std() + table.y[fold.train].mean()
        steps = (back - mean) / scale  # as the network that knew `own` would see them
        slope, start = np.polyfit(table.y[fold.test], steps, 1)
        known_scale, known_mean = 1 / slope, -start / slope
        assert abs(known_scale / scale - 1) < 0.15
        assert abs(known_mean - mean) < 0.3 * scale
        assert X.shape == (10, 2)
    np.testing.assert_array_equal(wrong.rows(fold.train)[0], right.rows(fold.train)[0])


def test_synthetic_table_without_full_retraining(tmp_path):
    methods = ("LA", "SCP", "ACP", "ACP-GN", "informed", "jackknife+")
    said = ask(tmp_path, tables=(reproduction.SYNTHETIC,), datasets=None, methods=methods, seeds=2, epochs=150)
    rows = read_rows(tmp_path / "results" / "synthetic_fullcp.csv")
    assert [r["method"] for r in rows[::3]] == list(methods)
    assert {(r["repeats"], r["dataset"]) for r in rows} == {("2", "")}
    assert rows[0]["command"] == "fullcp reproduce --table synthetic_fullcp --epochs 150 --seeds 2"
    assert any("synthetic_fullcp: 18 rows" in line for line in said)


def test_synthetic_draws():
    (X, y), (X_test, y_test) = synthetic.draw(3)
    assert (X.shape, y.shape, X_test.shape, y_test.shape) == ((500, 1), (500,), (100, 1), (100,))
    again = synthetic.draw(3)
    np.testing.assert_array_equal(again[0][1], y)
    # Noise: nine rows in ten 0.1, the others 1.0; differences of neighbours see sqrt(2) of it
    gaps = np.concatenate(
        [np.diff(synthetic.draw(s)[0][1][np.argsort(synthetic.draw(s)[0][0][:, 0])]) for s in range(8)]
    )
    assert 0.08 < np.median(np.abs(gaps)) / 0.6745 / 2**0.5 < 0.16
    assert 0.1 < np.mean(np.abs(gaps) > 0.7) < 0.2


def test_standardised_by_the_training_part_alone():
    table = Table("t", np.arange(100.0)[:, None] ** 2, np.arange(100.0), ("a",), "y")
    fold = folds_of(protocol_of("bike", repeats=1), 100)[0]
    data = scaled_fold(table, fold, "training")
    assert abs(data.y[fold.train].mean()) < 1e-12
    assert abs(data.X[fold.train].std() - 1) < 1e-12
    assert data.scale == Standardizer.of(table.y[fold.train])


@pytest.mark.skipif("FULLCP_DATA" not in os.environ, reason="FULLCP_DATA names no folder with the paper's data sets")
def test_two_real_data_sets_by_the_command(tmp_path):
    command = [sys.executable, "-m", "fullcp", "reproduce", "--table", "main", "--datasets", "yacht", "energy"]
    options = ["--seeds", "1", "--epochs", "120", "--device", "cpu"]
    options += ["--methods", "LA", "SCP", "SCP-GN", "ACP-GN", "ACP-GN (split + refine)"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    rows = read_rows(tmp_path / "results" / "main.csv")
    assert {r["dataset"] for r in rows} == {"yacht", "energy"}
    for row in rows:
        if row["method"] != "LA":
            assert float(row["coverage"]) > float(row["level"]) - 6, row
    beside = [sys.executable, "-m", "fullcp", "compare", "--datasets", "energy"]
    done = subprocess.run(beside, capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "main, energy, 768 rows, 8 inputs" in done.stdout
    assert "yacht" not in done.stdout


def test_the_help_lists_what_there_is():
    done = CliRunner().invoke(app, ["reproduce", "--help"], env={"COLUMNS": "400", "TERMINAL_WIDTH": "400"})
    assert done.exit_code == 0
    for name in (*DATASETS, *TABLES, "synthetic_fullcp", "bbox_50", "calibration_share", *METHODS, "FCP"):
        assert name in done.output, name
    assert "At least 100" in done.output


def test_compare_without_results(tmp_path):
    command = [sys.executable, "-m", "fullcp", "compare"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 1
    assert "results has no such tables: run `fullcp reproduce` first" in done.stderr


def test_the_figure_of_calibration_shares(small_yacht, monkeypatch):
    monkeypatch.setitem(SPECS, "calibration_share", replace(SPECS["calibration_share"], datasets=("yacht",)))
    ask(small_yacht, tables=("calibration_share",), seeds=2)
    rows = read_rows(small_yacht / "results" / "calibration_share.csv")
    refined = [r for r in rows if r["method"] == "ACP-GN (split + refine)" and r["level"] == "90"]
    assert [(r["calibration"], r["rows"]) for r in refined] == [
        (str(s), str(round(0.4 * s))) for s in (10, 25, 50, 75, 90)
    ]
    monkeypatch.setattr(introduction, "run", partial(introduction.run, epochs=30))
    command = ["figures", "--results", str(small_yacht / "results"), "--output", str(small_yacht / "pictures")]
    done = CliRunner().invoke(app, [*command, "--dataset", "yacht"])
    assert done.exit_code == 0, done.output
    assert sorted(path.name for path in (small_yacht / "pictures").iterdir()) == [
        "adaptivity.png",
        "calibration_share.png",
    ]
    done = CliRunner().invoke(app, [*command, "--dataset", "protein"])
    assert done.exit_code == 1
    assert "has no rows of protein" in done.output
    done = CliRunner().invoke(app, ["figures", "--results", str(small_yacht / "nowhere"), *command[3:]])
    assert done.exit_code == 1
    assert "calibration_share.csv does not exist: run `fullcp reproduce" in done.output
