"""One request for tables: train, evaluate, write; each stage takes up what is there."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from fullcp.data import DATASETS, DataUnavailableError, Table, load_dataset
from fullcp.experiments import box_tables, synthetic
from fullcp.experiments.authors_scaling import SCALINGS
from fullcp.experiments.box_tables import BoxTables, Photographs
from fullcp.experiments.protocol import Protocol, protocol_of
from fullcp.experiments.results import Results
from fullcp.experiments.store import RunFolder
from fullcp.experiments.tables import SPECS, TableSpec
from fullcp.experiments.uci_evaluation import Evaluator
from fullcp.experiments.uci_methods import METHODS, Arm
from fullcp.experiments.uci_training import Say, Trainer
from fullcp.inputs import check_choice
from fullcp.memory import parse_memory
from fullcp.training import Schedule

STAGES = ("train", "evaluate", "write", "all")
SYNTHETIC = synthetic.TABLE
BOXES = box_tables.TABLES
EVERY_TABLE = (*SPECS, SYNTHETIC, *BOXES)
EVERY_METHOD = tuple(dict.fromkeys([*METHODS, *synthetic.METHODS]))
LEAST_EPOCHS = Schedule().burn_in  # of networks that tune l2 as they train


@dataclass(frozen=True)
class Request:
    """What `fullcp reproduce` was asked for; None is all there is, or the paper's number.

    Attributes
    ----------
    photographs : for the tables of boxes, which have all methods and no data sets to choose.
    """

    tables: tuple[str, ...]
    datasets: tuple[str, ...] | None
    methods: tuple[str, ...] | None
    seeds: int | None
    epochs: int | None
    device: str
    stage: str
    run_dir: Path
    output: Path
    memory: str
    scaling: str = "training"
    photographs: Photographs = field(default_factory=Photographs)

    def specs(self) -> list[TableSpec]:
        """The tables asked for."""
        return [SPECS[name] for name in self.tables if name in SPECS]

    def check(self) -> None:
        """Refuse what there is not, before anything runs."""
        for name in self.tables:
            check_choice("table", name, EVERY_TABLE)
        for name in self.datasets or ():
            if Path(name).suffix:
                raise ValueError(f"datasets: {name} is a file; tables of your own are for `fullcp evaluate {name}`")
            check_choice("datasets", name, tuple(DATASETS))
            if not any(name in spec.datasets for spec in self.specs()):
                raise ValueError(f"datasets: {name} is in no table of {', '.join(self.tables)}")
        for name in self.methods or ():
            check_choice("methods", name, EVERY_METHOD)
        if self.methods is not None and set(BOXES) & set(self.tables):
            raise ValueError(f"methods: tables of boxes ({', '.join(BOXES)}) have all of them; ask for those alone")
        check_choice("stage", self.stage, STAGES)
        check_choice("scaling", self.scaling, SCALINGS)
        parse_memory(self.memory)

    def arms(self, dataset: str) -> list[Arm]:
        """What to evaluate on a data set, each once."""
        found = [arm for spec in self.specs() if dataset in spec.datasets for arm in spec.chosen(self.methods)]
        return list(dict.fromkeys(found))

    def names(self) -> list[str]:
        """The data sets, in the order of the tables."""
        named = dict.fromkeys(name for spec in self.specs() for name in spec.datasets)
        return [name for name in named if self.datasets is None or name in self.datasets]


def run(request: Request, say: Say) -> None:
    """Do what was asked; a data set that is not to be had is reported and left out."""
    request.check()
    if request.stage in ("write", "all"):
        _check_results(request, say)
    device = read_device(request.device)
    if device.type == "cpu":
        torch.set_num_threads(1) if _is_small(request) else None
    for name in request.names():
        try:
            table = load_dataset(name)
        except DataUnavailableError as error:
            if request.datasets is not None and name in request.datasets:
                raise
            say(f"{name} is left out: {error}")
            continue
        _run_dataset(request, table, device, say)
    if SYNTHETIC in request.tables:
        _run_synthetic(request, device, say)
    if set(BOXES) & set(request.tables):
        _run_boxes(request, device, say)


def _run_dataset(request: Request, table: Table, device: torch.device, say: Say) -> None:
    protocol = protocol_of(table.name, repeats=request.seeds, epochs=request.epochs)
    arms = request.arms(table.name)
    if request.stage in ("train", "all"):
        check_epochs(protocol, table.name)
    if request.stage in ("train", "all"):
        roles = list(dict.fromkeys(role for arm in arms for role in arm.roles()))
        Trainer(table, protocol, request.run_dir, device, say).run(roles)
    if request.stage in ("evaluate", "all"):
        evaluator = Evaluator(table, protocol, request.run_dir, device, request.memory, say, scaling=request.scaling)
        evaluator.run(arms)
    if request.stage in ("write", "all"):
        results = _results(request, say)
        # First, for it refuses networks that were trained otherwise than asked for.
        results.write_training(RunFolder(request.run_dir, table.name, protocol.training_facts()))
        for spec in request.specs():
            if table.name in spec.datasets:
                results.write(spec.name, protocol, table.X.shape, spec.chosen(request.methods))


def check_epochs(protocol: Protocol, name: str) -> None:
    """Refuse trainings that end before their tuning begins."""
    if protocol.tunes_in_training and protocol.epochs < LEAST_EPOCHS:
        raise ValueError(
            f"epochs must be at least {LEAST_EPOCHS} for {name}, when tuning begins, got {protocol.epochs}"
        )


def _check_results(request: Request, say: Say) -> None:
    """Refuse to lose rows of more repeats, before anything is trained."""
    results = _results(request, say)
    for name in request.names():
        protocol = protocol_of(name, repeats=request.seeds, epochs=request.epochs)
        for spec in request.specs():
            if name in spec.datasets:
                results.check(spec.name, name, protocol.repeats, protocol.epochs == protocol_of(name).epochs)
    if SYNTHETIC in request.tables:
        epochs = request.epochs or synthetic.EPOCHS
        results.check(SYNTHETIC, "", request.seeds or synthetic.REPEATS, epochs == synthetic.EPOCHS)
    for table in BOXES:
        if table in request.tables:
            epochs = request.epochs or box_tables.EPOCHS
            seeds, name = request.seeds or box_tables.SEEDS, table + request.photographs.variant
            results.check(name, "", seeds, epochs == box_tables.EPOCHS)


def _results(request: Request, say: Say) -> Results:
    return Results(request.output, request.run_dir, say, scaling=request.scaling)


def _run_synthetic(request: Request, device: torch.device, say: Say) -> None:
    repeats, epochs = request.seeds or synthetic.REPEATS, request.epochs or synthetic.EPOCHS
    task = synthetic.Synthetic(request.run_dir, device, say, repeats=repeats, epochs=epochs)
    if request.stage in ("train", "all"):
        task.train()
    arms = [arm for arm in synthetic.ARMS if request.methods is None or arm.method in request.methods]
    if request.stage in ("evaluate", "all"):
        task.evaluate(arms, request.memory)
    if request.stage in ("write", "all"):
        results = _results(request, say)
        results.write_training(task.store)
        results.write_synthetic(repeats, epochs, arms)


def _run_boxes(request: Request, device: torch.device, say: Say) -> None:
    seeds, epochs = request.seeds or box_tables.SEEDS, request.epochs or box_tables.EPOCHS
    task = BoxTables(request.photographs, request.run_dir, device, say, seeds=seeds, epochs=epochs)
    if request.stage in ("train", "all"):
        task.train()
    if request.stage in ("evaluate", "all"):
        task.evaluate()
    if request.stage in ("write", "all"):
        results = _results(request, say)
        for table in BOXES:
            if table in request.tables:
                results.write_boxes(table, task)


def read_device(word: str) -> torch.device:
    """The device that a word names."""
    if word == "auto":
        word = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(word)
    except RuntimeError as error:
        raise ValueError(f"device must be 'auto', 'cpu' or 'cuda', got {word!r}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device 'cuda' is asked for, and there is none here")
    return device


def _is_small(request: Request) -> bool:
    """Whether threads gain nothing."""
    return not set(BOXES) & set(request.tables) and all(DATASETS[name].group != "large" for name in request.names())
