"""Methods on stored networks, fold by fold: one line a fold, method and level, in a file that resumes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from fullcp.data import Table
from fullcp.experiments.authors_scaling import scaled_fold
from fullcp.experiments.lines import LineFile
from fullcp.experiments.measure import COLUMNS, Line, measure
from fullcp.experiments.protocol import Fold, Protocol, folds_of
from fullcp.experiments.provenance import commit, device_name
from fullcp.experiments.store import RunFolder
from fullcp.experiments.uci_methods import METHODS, Arm, Bench
from fullcp.experiments.uci_training import Role, Say, make_network
from fullcp.progress import track


class Evaluator:
    """Evaluates what is missing of a data set's arms, and appends it to the run folder.

    Parameters
    ----------
    memory : for the predictors.
    scaling : of rows that networks have not seen, see `authors_scaling`; each has a file of lines of its own.
    """

    def __init__(
        self,
        table: Table,
        protocol: Protocol,
        folder: Path,
        device: torch.device,
        memory: str,
        say: Say,
        *,
        scaling: str = "training",
    ):
        self.table, self.protocol, self.device, self.memory, self.say = table, protocol, device, memory, say
        self.scaling = scaling
        self.where = {"device": device_name(device), "commit": commit()}
        self.store = RunFolder(folder, protocol.dataset, protocol.training_facts())
        self.lines = line_file(folder, protocol.dataset, scaling)
        self.folds = folds_of(protocol, len(table))

    def run(self, arms: Sequence[Arm]) -> None:
        """All arms on all folds that lack them."""
        done = {(int(line["fold"]), line["method"]) for line in self.lines.read()}
        todo = [(f, [arm for arm in arms if (f.number, arm.name) not in done]) for f in self.folds]
        todo = [(fold, left) for fold, left in todo if left]
        if not todo:
            return
        self.say(f"{self.protocol.dataset}: {len(arms)} methods on {len(todo)} folds")
        for fold, left in track(todo, self.protocol.dataset, len(todo)):
            bench = self._bench(fold)
            alike = sorted(left, key=lambda arm: (arm.method, arm.curvature, arm.share))  # those that share a fit
            self.lines.append([line for arm in alike for line in self._lines(bench, arm)])

    def _lines(self, bench: Bench, arm: Arm) -> list[Line]:
        """The lines of an arm on a fold, in the target's units; none where a network of it diverged."""
        fold = bench.data.fold
        if any(self._is_lost(role, fold) for role in arm.roles()):
            self.say(f"{self.protocol.dataset}: fold {fold.number} has no {arm.method}, its network diverged")
            return []
        X, y = bench.data.unseen(fold.test, arm.share)
        scale = float(bench.data.scale.scale)
        lines = measure(lambda: METHODS[arm.method].make(bench, arm), X, y, scale=scale)
        of = {"fold": fold.number, "repeat": fold.repeat, "method": arm.name, **self.where}
        return [{**of, **line} for line in lines]

    def _bench(self, fold: Fold) -> Bench:
        def network(role: Role) -> nn.Module:
            stored = self.store.cached(role.name)
            model = make_network(self.protocol, self.table.X.shape[1], role.kind)
            torch.nn.utils.vector_to_parameters(stored.theta[stored.place(fold.number)], model.parameters())
            return model.to(self.device)

        def l2(role: Role) -> object:
            stored = self.store.cached(role.name)
            values = stored.l2[stored.place(fold.number)]
            return float(values) if len(values) == 1 else values.numpy()

        def noise(role: Role) -> float:
            stored = self.store.cached(role.name)
            return float(stored.noise[stored.place(fold.number)])

        data = scaled_fold(self.table, fold, self.scaling)
        return Bench(self.protocol, data, network, l2, noise, self.memory)

    def _is_lost(self, role: Role, fold: Fold) -> bool:
        stored = self.store.cached(role.name)
        return bool(stored.lost[stored.place(fold.number)])


def line_file(folder: Path, dataset: str, scaling: str = "training") -> LineFile:
    """Where the lines of a data set are."""
    return LineFile(folder / dataset / ("folds.csv" if scaling == "training" else f"folds-{scaling}.csv"), COLUMNS)
