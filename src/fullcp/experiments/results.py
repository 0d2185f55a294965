"""The tables as files: results/<table>.csv with where each row comes from, results/training.csv with what it cost."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fullcp.experiments import synthetic
from fullcp.experiments.box_tables import BoxTables
from fullcp.experiments.protocol import Protocol, protocol_of
from fullcp.experiments.store import RunFolder
from fullcp.experiments.summary import Values, summarise
from fullcp.experiments.tables import SPECS
from fullcp.experiments.uci_evaluation import line_file
from fullcp.experiments.uci_methods import Arm
from fullcp.report import write_csv

COLUMNS = (
    "table",
    "dataset",
    "n",
    "inputs",
    "method",
    "curvature",
    "conformity",
    "calibration",
    "level",
    "size",
    "size_se",
    "coverage",
    "coverage_se",
    "valid",
    "infinite",
    "score",
    "rows",
    "repeats",
    "folds",
    "seeds",
    "seconds",
    "seconds_se",
    "device",
    "commit",
    "command",
)
TRAINING_COLUMNS = ("dataset", "stage", "networks", "epochs", "roles", "seconds", "device", "commit")
Row = dict[str, Any]
Say = Callable[[str], None]


class Results:
    """Tables in a folder; what is written of a method on a data set takes the place of what was there of it.

    Parameters
    ----------
    scaling : other than "training" makes tables of their own, `results/<table>_<scaling>.csv`.
    """

    def __init__(self, folder: Path, run_dir: Path, say: Say, *, scaling: str = "training"):
        self.folder, self.run_dir, self.say, self.scaling = folder, run_dir, say, scaling

    def path(self, table: str) -> Path:
        """The file of a table."""
        return table_path(self.folder, table, self.scaling)

    def check(self, table: str, dataset: str, repeats: int, paper_epochs: bool) -> None:
        """Refuse, before anything is trained, to put fewer repeats or other epochs in the place of what is there."""
        for row in read_rows(self.path(table)):
            if row["dataset"] == dataset:
                self._refuse_loss(table, row, repeats, paper_epochs)

    def _refuse_loss(self, table: str, row: Mapping[str, str], repeats: int, paper_epochs: bool) -> None:
        if int(row["repeats"]) > repeats or (not paper_epochs and "--epochs" not in row["command"]):
            of = f" of {row['dataset']}" if row["dataset"] else ""
            how = "" if paper_epochs else " with other epochs than the paper has"
            raise ValueError(
                f"output: {self.path(table)} has {row['repeats']} repeat(s){of}, and {repeats}{how} would take their "
                "place: name another folder (--output)"
            )

    def write(self, table: str, protocol: Protocol, shape: tuple[int, ...], arms: Sequence[Arm]) -> None:
        """The rows of a data set, inputs of this shape, in a table of UCI sets."""
        lines = line_file(self.run_dir, protocol.dataset, self.scaling).read()
        lines = [line for line in lines if int(line["repeat"]) < protocol.repeats]
        of = {"table": table, "dataset": protocol.dataset, "n": shape[0], "inputs": shape[1]}
        command = f"fullcp reproduce --table {table} --datasets {protocol.dataset}"
        command += "" if protocol.epochs == protocol_of(protocol.dataset).epochs else f" --epochs {protocol.epochs}"
        command += "" if self.scaling == "training" else f" --scaling {self.scaling}"
        self._write(table, protocol.dataset, rows_of(of, lines, arms, command))

    def write_synthetic(self, repeats: int, epochs: int, arms: Sequence[Arm]) -> None:
        """The comparison with full conformal prediction."""
        lines = [line for line in line_file(self.run_dir, synthetic.NAME).read() if int(line["repeat"]) < repeats]
        of = {"table": synthetic.TABLE, "dataset": "", "n": "", "inputs": ""}
        command = f"fullcp reproduce --table {synthetic.TABLE}"
        command += "" if epochs == synthetic.EPOCHS else f" --epochs {epochs}"
        self._write(synthetic.TABLE, "", rows_of(of, lines, arms, command))

    def write_boxes(self, table: str, task: BoxTables) -> None:
        """One of the tables of boxes; those of a frozen backbone are tables of their own."""
        rows = [{column: row[column] for column in COLUMNS} for row in task.rows(table)]
        self._write(table + task.asked.variant, "", rows)
        training = list(task.training())
        if training:
            self._replace(self.folder / "training.csv", TRAINING_COLUMNS, training[0]["dataset"], training)

    def write_training(self, store: RunFolder) -> None:
        """What the networks of a data set cost; an ensemble of several roles once."""
        entries: dict[tuple[Any, ...], list[str]] = {}
        for role in store.roles():
            for entry in store.cached(role).history:
                key = tuple(entry[name] for name in ("stage", "networks", "seconds", "device", "commit"))
                entries.setdefault(key, []).append(role)
        dataset = store.facts["dataset"]
        rows = [
            {
                "dataset": dataset,
                "stage": stage,
                "networks": networks,
                "epochs": store.facts["grid_epochs" if stage == "grid" else "epochs"],
                "roles": " ".join(roles),
                "seconds": seconds,
                "device": device,
                "commit": commit,
            }
            for (stage, networks, seconds, device, commit), roles in entries.items()
        ]
        if rows:
            self._replace(self.folder / "training.csv", TRAINING_COLUMNS, dataset, rows)

    def _write(self, table: str, dataset: str, rows: list[Row]) -> None:
        if not rows:
            self.say(f"{table}: nothing is evaluated of {dataset or 'it'} yet")
            return
        path = self.path(table)
        new = {_arm_of(row): row for row in rows}
        for row in read_rows(path):
            if row["dataset"] == dataset and _arm_of(row) in new:
                mine = new[_arm_of(row)]
                self._refuse_loss(table, row, int(str(mine["repeats"])), "--epochs" not in str(mine["command"]))
        self._replace(path, COLUMNS, dataset, rows)
        self.say(f"{table}: {len(rows)} rows{' of ' + dataset if dataset else ''} in {path}")

    def _replace(self, path: Path, columns: Sequence[str], dataset: str, rows: list[Row]) -> None:
        """Put rows in the place of a data set's, in the order of the tables."""
        self.folder.mkdir(parents=True, exist_ok=True)
        arms = {_arm_of(row) for row in rows}
        kept: list[Row] = [
            dict(row) for row in read_rows(path, columns) if row["dataset"] != dataset or _arm_of(row) not in arms
        ]
        order = list(dict.fromkeys(name for spec in SPECS.values() for name in spec.datasets))
        place = {name: i for i, name in enumerate(order)}
        arms_in_order = [_arm_of(row) for row in _as_rows(_arms_of(path.stem))]

        def key(row: Mapping[str, object]) -> tuple[int, int]:
            arm = _arm_of(row)
            return place.get(str(row["dataset"]), -1), arms_in_order.index(arm) if arm in arms_in_order else -1

        write_csv(path, sorted([*kept, *rows], key=key))


def _arms_of(name: str) -> Sequence[Arm]:
    """The methods of a table in their order; none of other files."""
    table = name.split("_authors")[0]
    if table == synthetic.TABLE:
        return synthetic.ARMS
    return SPECS[table].arms if table in SPECS else ()


def _as_rows(arms: Sequence[Arm]) -> list[Row]:
    """What of rows comes from the method."""
    return [
        {
            "method": arm.method,
            "curvature": "" if arm.curvature == "full" else arm.curvature,
            "conformity": arm.score,
            "calibration": arm.share,
        }
        for arm in arms
    ]


def _arm_of(row: Mapping[str, Any]) -> tuple[str, ...]:
    """What rows of a data set differ by but for levels: the method in a table, what was trained in training.csv."""
    return tuple(str(row.get(name, "")) for name in ("method", "curvature", "conformity", "calibration"))


def table_path(folder: Path, table: str, scaling: str = "training") -> Path:
    """Where a table is."""
    return folder / (f"{table}.csv" if scaling == "training" else f"{table}_{scaling}.csv")


def read_rows(path: Path, columns: Sequence[str] = COLUMNS) -> list[dict[str, str]]:
    """The rows of a file that was written here; none where it is not there."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
        if list(reader.fieldnames or ()) != list(columns):
            raise ValueError(f"{path} is no table of results: its columns are {', '.join(reader.fieldnames or ())}")
    return rows


def rows_of(of: Row, lines: Sequence[Values], arms: Sequence[Arm], command: str) -> list[Row]:
    """Rows from lines a fold; `of` is what all have in common, the command lacks the number of seeds."""
    found: list[Row] = []
    for arm in arms:
        own = [line for line in lines if line["method"] == arm.name]
        for summary in summarise(own):
            row = {
                **of,
                **_as_rows([arm])[0],
                **summary,
                "command": f"{command} --seeds {max(int(line['repeat']) for line in own) + 1}",
            }
            found.append({column: row[column] for column in COLUMNS})
    return found
