"""The methods on a user's own table, by the paper's protocol for its number of rows.

Rows are split into ten folds, or once into 90 and 10 per cent where there are many; networks of 50 units tune l2 by the
marginal likelihood as they train, all folds and roles together, and every method is evaluated on the same networks.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from shlex import quote

import torch

from fullcp.data import Table
from fullcp.data.uci import digest
from fullcp.experiments.protocol import SHARES, protocol_by_size
from fullcp.experiments.reproduction import check_epochs, read_device
from fullcp.experiments.results import Row, rows_of
from fullcp.experiments.tables import arms_of_share
from fullcp.experiments.uci_evaluation import Evaluator
from fullcp.experiments.uci_methods import Arm
from fullcp.experiments.uci_training import Say, Trainer
from fullcp.inputs import check_choice
from fullcp.memory import parse_memory

EPOCHS = 1000  # the paper takes 5,000
METHODS = tuple(arm.method for arm in arms_of_share(SHARES[0]))


def evaluate_table(
    table: Table,
    say: Say,
    *,
    methods: Sequence[str] | None = None,
    calibration: int = 25,
    seeds: int = 1,
    epochs: int = EPOCHS,
    device: str = "auto",
    memory: str = "4GB",
    run_dir: Path | None = None,
) -> list[Row]:
    """A row a method and level, as in the tables of results; widths in the target's units.

    Parameters
    ----------
    methods : of `METHODS`; None is all.
    calibration : per cent of the training rows that methods with a guarantee calibrate on.
    seeds : how many times rows are split anew, into ten folds each or into a training and a test part.
    run_dir : where networks are kept, to go on with; None keeps nothing.
    """
    arms = chosen(methods, calibration)
    parse_memory(memory)
    name = f"{Path(table.name).stem}-{digest(table)[:12]}"  # networks of other numbers are other networks
    protocol = protocol_by_size(name, len(table), repeats=seeds, epochs=epochs)
    check_epochs(protocol, table.name)
    where = read_device(device)
    if where.type == "cpu":
        torch.set_num_threads(1)
    with ExitStack() as stack:
        folder = run_dir or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        roles = list(dict.fromkeys(role for arm in arms for role in arm.roles()))
        Trainer(table, protocol, folder, where, say).run(roles)
        evaluator = Evaluator(table, protocol, folder, where, memory, say)
        evaluator.run(arms)
        lines = [line for line in evaluator.lines.read() if int(line["repeat"]) < seeds]
    of = {"table": "own", "dataset": table.name, "n": len(table), "inputs": table.X.shape[1]}
    command = f"fullcp evaluate {quote(table.name)} --target {quote(table.target)}"
    rows = rows_of(of, lines, arms, f"{command} --calibration {calibration} --epochs {epochs}")
    if not rows:
        raise ValueError(f"all networks diverged on {table.name}: are there values far from all others in it?")
    return rows


def chosen(methods: Sequence[str] | None, calibration: int) -> list[Arm]:
    """The methods asked for, in the order of the tables."""
    if calibration not in SHARES:
        raise ValueError(f"calibration must be {' or '.join(map(str, sorted(SHARES)))} per cent, got {calibration}")
    for name in methods or ():
        check_choice("methods", name, METHODS)
    return [arm for arm in arms_of_share(calibration) if methods is None or arm.method in methods]
