"""The networks of the UCI tables: all folds, shares and kinds of a data set in as few ensembles as there can be.

A fold has networks of several roles. `full` has all its training rows, `fit-50` and `fit-25` what 50 or 25 per cent for
calibration leave; these have their l2 tuned. `base` (of split + refine) has a small fixed one; `size` (of CRF) learns
the size of the residuals of `fit`, and `quantile` (of CQR) quantiles, both with the l2 of `fit`.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fullcp.data import Table
from fullcp.experiments.mixed import NUMBER, QUANTILES, MixedLoss, narrowed, widened
from fullcp.experiments.protocol import LEVELS, Fold, Protocol, ScaledFold, folds_of
from fullcp.experiments.provenance import commit, device_name
from fullcp.experiments.store import RunFolder, Stored
from fullcp.inputs import read_levels
from fullcp.predictors.quantile import quantiles_of
from fullcp.predictors.residual_fit import log_residuals
from fullcp.training import Training, grid_search, mlp, replicate, train_ensemble
from fullcp.training.grid import GRID

TUNED, FIXED = ("full", "fit"), ("base", "size", "quantile")
TAUS = tuple(float(tau) for tau in quantiles_of(sorted(set(read_levels(LEVELS)))))
_BASE_L2 = 1e-4  # a row
Say = Callable[[str], None]


@dataclass(frozen=True)
class Role:
    """What a network is for."""

    kind: str
    share: int = 0  # per cent of the training part that calibrate

    @property
    def name(self) -> str:
        """As in file names."""
        return f"{self.kind}-{self.share}" if self.share else self.kind

    @property
    def seed(self) -> int:
        """Where its seeds begin; the fold's number is added."""
        return 1000 * ((*TUNED, *FIXED).index(self.kind) + 10 * self.share)

    def rows(self, fold: Fold) -> Any:
        """The rows that train it."""
        return fold.parts(self.share)[0] if self.share else fold.train


Member = tuple[Role, Fold]


def make_network(protocol: Protocol, inputs: int, kind: str) -> nn.Module:
    """An untrained network for a role of this kind."""
    return mlp(inputs, protocol.hidden, outputs=len(TAUS) if kind == "quantile" else 1)


class Trainer:
    """Trains what is missing of the networks of a data set, and writes it to the run folder.

    Parameters
    ----------
    say : is told what goes on.
    """

    def __init__(self, table: Table, protocol: Protocol, folder: Path, device: torch.device, say: Say):
        self.table, self.protocol, self.device, self.say = table, protocol, device, say
        self.folds = folds_of(protocol, len(table))
        self.store = RunFolder(folder, protocol.dataset, protocol.training_facts())
        self._scaled: dict[int, ScaledFold] = {}

    def run(self, roles: Sequence[Role]) -> None:
        """Train these roles and those that they rest on, in order."""
        roles = _with_needs(roles)
        tuned = [role for role in roles if role.kind in TUNED]
        fixed = [role for role in roles if role.kind in FIXED]
        sizes = [role for role in fixed if role.kind == "size"]
        others = [role for role in fixed if role.kind != "size"]
        if self.protocol.tunes_in_training:
            self._train("tuned", tuned, self.protocol.rates)
            self._train("fixed", fixed, self.protocol.plain_rates)
        else:
            self._search(tuned)
            self._train("fixed", [*tuned, *others], self.protocol.rates)
            self._train("sizes", sizes, self.protocol.plain_rates)

    def _members(self, roles: Sequence[Role], prefix: str = "") -> list[Member]:
        """Roles and folds without a network."""
        numbers = [fold.number for fold in self.folds]
        return [(r, self.folds[k]) for r in roles for k in self.store.missing(prefix + r.name, numbers)]

    def _search(self, roles: Sequence[Role]) -> None:
        """Choose l2 from the grid by the loss on a tenth of the rows."""
        members = self._members(roles, "grid-")
        if not members:
            return
        self._announce("grid", members, self.protocol.grid_epochs, len(GRID))
        start = time.perf_counter()
        models = self._models(members)
        with self._checkpoint("grid", members) as checkpoint:
            found = grid_search(
                models,
                [self._pair(role, fold) for role, fold in members],
                GRID,
                seed=_seeds(members),
                epochs=self.protocol.grid_epochs,
                batch_size=self.protocol.batch_size,
                learning_rate=self.protocol.rates,
                checkpoint=checkpoint,
            )
            l2 = torch.tensor([[search.l2] for search in found], dtype=torch.float64)
            losses = torch.tensor([search.losses for search in found], dtype=torch.float64)
            n = len(members)
            nothing = Stored(
                _numbers(members),
                torch.zeros(n, 0),
                l2,
                torch.ones(n, dtype=torch.float64),
                torch.zeros(n, dtype=torch.bool),
                losses,
            )
            self._write(members, nothing, "grid", time.perf_counter() - start, prefix="grid-")

    def _train(self, stage: str, roles: Sequence[Role], rates: tuple[float, float]) -> None:
        """Train an ensemble."""
        members = self._members(roles)
        if not members:
            return
        self._announce(stage, members, self.protocol.epochs)
        start = time.perf_counter()
        tunes = stage == "tuned"
        mixed = any(role.kind == "quantile" for role, _ in members)
        models = self._models(members)
        wide = self._widened(members, models) if mixed else models
        with self._checkpoint(stage, members) as checkpoint:
            runs = train_ensemble(
                wide,
                [self._pair(role, fold, mixed=mixed) for role, fold in members],
                l2="marglik" if tunes else [self._penalty(role, fold) for role, fold in members],
                epochs=self.protocol.epochs,
                batch_size=self.protocol.batch_size,
                learning_rate=rates,
                seed=_seeds(members),
                loss=MixedLoss(TAUS) if mixed else "squared",
                checkpoint=checkpoint,
            )
            for trained, model in zip(wide, models, strict=True):
                if trained is not model:
                    narrowed(trained, model)
            self._keep(members, models, runs, stage, start)
        self.say(f"{self.protocol.dataset}: {stage} done in {time.perf_counter() - start:.1f} s")

    def _keep(
        self, members: list[Member], models: list[nn.Module], runs: list[Training], stage: str, start: float
    ) -> None:
        """Write what was trained, role by role."""
        l2 = [torch.as_tensor(run.l2, dtype=torch.float64).reshape(-1) for run in runs]
        weights = [torch.cat([p.detach().reshape(-1) for p in model.parameters()]).cpu() for model in models]
        noise = torch.tensor([run.noise for run in runs], dtype=torch.float64)
        lost = torch.tensor([run.divergence is not None for run in runs])
        seconds = time.perf_counter() - start
        for role in dict.fromkeys(role for role, _ in members):
            at = [i for i, (other, _) in enumerate(members) if other == role]
            part = [members[i] for i in at]
            stored = Stored(
                _numbers(part),
                torch.stack([weights[i] for i in at]),
                torch.stack([l2[i] for i in at]),
                noise[at],
                lost[at],
                torch.zeros(len(at), 0, dtype=torch.float64),
            )
            self._write(part, stored, stage, seconds, of=len(members))

    def _write(
        self, members: list[Member], stored: Stored, stage: str, seconds: float, *, prefix: str = "", of: int = 0
    ) -> None:
        """Add rows to the files of their roles."""
        entry = {
            "stage": stage,
            "seconds": round(seconds, 2),
            "networks": of or len(members),
            "device": device_name(self.device),
            "commit": commit(),
        }
        for role in dict.fromkeys(role for role, _ in members):
            at = torch.tensor([i for i, (other, _) in enumerate(members) if other == role])
            part = {name: value[at] for name, value in vars(stored).items() if isinstance(value, Tensor)}
            self.store.add(prefix + role.name, Stored(**part, history=[entry]))

    def _models(self, members: list[Member]) -> list[nn.Module]:
        """Untrained networks, one a member."""
        inputs = self.table.X.shape[1]
        return [
            replicate(partial(make_network, self.protocol, inputs, role.kind), [seed])[0].to(self.device)
            for (role, _), seed in zip(members, _seeds(members), strict=True)
        ]

    def _widened(self, members: list[Member], models: list[nn.Module]) -> list[nn.Module]:
        """All with as many outputs as the networks of quantiles have."""
        inputs = self.table.X.shape[1]
        return [
            model
            if role.kind == "quantile"
            else widened(model, make_network(self.protocol, inputs, "quantile").to(self.device))
            for (role, _), model in zip(members, models, strict=True)
        ]

    def _pair(self, role: Role, fold: Fold, *, mixed: bool = False) -> tuple[Tensor, Tensor]:
        """The rows that train a network, and their targets; `mixed` ensembles want to know the kind of network."""
        if fold.number not in self._scaled:
            self._scaled[fold.number] = ScaledFold.of(self.table, fold)
        X, y = self._scaled[fold.number].rows(role.rows(fold))
        x = torch.as_tensor(X, dtype=torch.float32, device=self.device)
        t = torch.as_tensor(y, dtype=torch.float64, device=self.device)[:, None]
        if role.kind == "size":
            with torch.no_grad():
                f = self.network(Role("fit", role.share), fold)(x).double()
            t = log_residuals(t, f, torch.float32)
        if mixed:
            kind = torch.full_like(t, QUANTILES if role.kind == "quantile" else NUMBER)
            t = torch.cat([t, kind], 1)
        return x, t.float()

    def _penalty(self, role: Role, fold: Fold) -> Any:
        """The l2 that a network is trained with."""
        if role.kind == "base":
            return _BASE_L2 * len(role.rows(fold))
        if role.kind in TUNED:
            stored, i = self._stored(f"grid-{role.name}", fold)
        else:
            name = Role("fit", role.share).name
            stored, i = self._stored(name if self.protocol.tunes_in_training else f"grid-{name}", fold)
        l2 = stored.l2[i]
        return float(l2) if len(l2) == 1 else l2.numpy()

    def network(self, role: Role, fold: Fold) -> nn.Module:
        """A trained network on the device."""
        stored, i = self._stored(role.name, fold)
        model = make_network(self.protocol, self.table.X.shape[1], role.kind)
        torch.nn.utils.vector_to_parameters(stored.theta[i], model.parameters())
        return model.to(self.device)

    def _stored(self, name: str, fold: Fold) -> tuple[Stored, int]:
        stored = self.store.cached(name)
        return stored, stored.places()[fold.number]

    def _announce(self, stage: str, members: list[Member], epochs: int, times: int = 1) -> None:
        names = ", ".join(dict.fromkeys(role.name for role, _ in members))
        self.say(f"{self.protocol.dataset}: {stage}, {len(members) * times} networks ({names}), {epochs} epochs")

    @contextmanager
    def _checkpoint(self, stage: str, members: list[Member]) -> Iterator[Path | None]:
        """A file for a long ensemble, gone when its networks are written; a GPU is done before one would pay."""
        if self.device.type != "cpu":
            yield None
            return
        key = hashlib.sha256(repr([(role.name, fold.number) for role, fold in members]).encode()).hexdigest()[:12]
        self.store.path.mkdir(parents=True, exist_ok=True)
        path = self.store.path / f"{stage}-{key}.part"
        yield path
        path.unlink(missing_ok=True)


def _with_needs(roles: Sequence[Role]) -> list[Role]:
    """The roles, and before them those whose networks or l2 they take."""
    needed = [Role("fit", role.share) for role in roles if role.kind in ("size", "quantile")]
    return sorted({*needed, *roles}, key=lambda role: ((*TUNED, *FIXED).index(role.kind), -role.share))


def _seeds(members: Sequence[Member]) -> list[int]:
    return [role.seed + fold.number for role, fold in members]


def _numbers(members: Sequence[Member]) -> Tensor:
    return torch.tensor(np.array([fold.number for _, fold in members], dtype=np.int64))
