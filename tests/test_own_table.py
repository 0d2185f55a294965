"""`fullcp evaluate`: the methods on a table that a user has."""

from __future__ import annotations

import csv

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fullcp.commands import app
from fullcp.data import Standardizer, load_table
from fullcp.experiments.own_table import METHODS, evaluate_table
from fullcp.experiments.protocol import folds_of, protocol_by_size
from fullcp.experiments.uci_training import Role, Trainer

ROWS = 80


@pytest.fixture
def houses(tmp_path):
    rng = np.random.default_rng(0)
    size, age = rng.normal(size=(2, ROWS))
    price = 100 + 20 * size + 5 * rng.normal(size=ROWS)
    lines = [f"{p:.4f},{s:.4f},{a:.4f},Elm" for p, s, a in zip(price, size, age)]
    (tmp_path / "houses.csv").write_text("\n".join(["price,size,age,street", *lines]) + "\n")
    return tmp_path / "houses.csv"


def ask(*words):
    return CliRunner().invoke(app, ["evaluate", *map(str, words)])


def test_all_methods_on_a_table(houses):
    output = houses.parent / "made.csv"
    options = ("--target", "price", "--exclude", "street", "--epochs", 100, "--device", "cpu", "--output", output)
    done = ask(houses, *options)
    assert done.exit_code == 0, done.output
    assert "houses.csv: price, 80 rows, 2 inputs" in done.output
    with output.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["method"] for row in rows[::3]] == list(METHODS)
    assert {(row["n"], row["inputs"], row["repeats"], row["folds"]) for row in rows} == {("80", "2", "1", "10")}
    assert {row["calibration"] for row in rows} == {"0", "25"}
    for row in rows:
        assert f"{float(row['coverage']):.3g}" in done.output
        if row["level"] == "90" and row["method"] != "CQR":
            assert 5 < float(row["size"]) < 80


def test_split_conformal_rows_by_hand(houses, tmp_path):
    table = load_table(houses, target="price", exclude=["street"])
    said = []
    rows = evaluate_table(table, said.append, methods=["SCP"], epochs=100, device="cpu", run_dir=tmp_path / "run")
    (folder,) = (tmp_path / "run").iterdir()
    protocol = protocol_by_size(folder.name, ROWS, repeats=1, epochs=100)
    trainer = Trainer(table, protocol, tmp_path / "run", torch.device("cpu"), said.append)
    widths, covered = [], []
    for fold in folds_of(protocol, ROWS):
        fit, cal = fold.parts(25)
        x, y = Standardizer.of(table.X[fold.train]), Standardizer.of(table.y[fold.train])
        network = trainer.network(Role("fit", 25), fold)

        def f(which, x=x, y=y, network=network):
            inputs = torch.tensor(x.transform(table.X[which]), dtype=next(network.parameters()).dtype)
            return y.inverse(network(inputs).detach().numpy()[:, 0].astype(float))

        half = np.sort(np.abs(table.y[cal] - f(cal)))[int(np.ceil(0.9 * (len(cal) + 1))) - 1]
        widths.append(2 * half)
        covered.append(np.mean(np.abs(table.y[fold.test] - f(fold.test)) <= half))
        assert not set(fit) & set(cal)
    (at_90,) = [row for row in rows if row["level"] == "90"]
    assert float(at_90["size"]) == pytest.approx(np.mean(widths), rel=1e-4)
    assert float(at_90["coverage"]) == pytest.approx(100 * np.mean(covered), abs=1e-3)
    # The same numbers again train nothing; other numbers have networks of their own.
    assert said
    said.clear()
    again = evaluate_table(table, said.append, methods=["SCP"], epochs=100, device="cpu", run_dir=tmp_path / "run")
    assert (again, said) == (rows, [])
    houses.write_text(houses.read_text().replace("price,size,age", "price,age,size").replace("0.1", "0.2"))
    other = load_table(houses, target="price", exclude=["street"])
    evaluate_table(other, said.append, methods=["SCP"], epochs=100, device="cpu", run_dir=tmp_path / "run")
    assert len(list((tmp_path / "run").iterdir())) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "text in column 'street', row 1: 'Elm'"),
        (("--exclude", "street", "--target", "cost"), "target 'cost' is no column of houses.csv: it has price, size"),
        (("--exclude", "street", "--epochs", "99"), "epochs must be at least 100 for houses.csv"),
        (("--exclude", "street", "--methods", "FCP"), "methods must be"),
        (("--exclude", "street", "--calibration", "10"), "calibration must be 25 or 50 per cent, got 10"),
        (("--exclude", "street", "--output", "nowhere/made.csv"), "output must be a file in a folder that exists"),
        (("--exclude", "street", "--memory", "much"), "memory"),
    ],
)
def test_what_is_wrong_is_said_at_once(houses, options, message):
    done = ask(houses, *options)
    assert done.exit_code == 1
    assert message in done.output
    assert "tuned" not in done.output


def test_files_that_are_not_there(tmp_path):
    done = ask(tmp_path / "nothing.csv")
    assert done.exit_code == 1
    assert "path is no file" in done.output
    done = CliRunner().invoke(app, ["reproduce", "--table", "main", "--datasets", "houses.csv"])
    assert done.exit_code == 1
    assert "tables of your own are for `fullcp evaluate houses.csv`" in done.output


def test_few_rows_are_enough(tmp_path):
    rng = np.random.default_rng(0)
    np.save(tmp_path / "few.npy", rng.normal(size=(12, 3)))
    rows = evaluate_table(load_table(tmp_path / "few.npy"), print, epochs=100, device="cpu")
    assert {row["method"] for row in rows} == set(METHODS)


def test_many_rows_are_split_once():
    protocol = protocol_by_size("t", 5001, repeats=1)
    assert (protocol.folds, protocol.residuals, protocol.hidden) == (0, "signed", (50,))
    assert len(folds_of(protocol, 5001)) == 1
    assert protocol_by_size("t", 5000).residuals == "absolute"
