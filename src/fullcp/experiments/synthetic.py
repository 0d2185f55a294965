"""The comparison with exact full conformal prediction on synthetic data with outliers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fullcp.data import halves
from fullcp.experiments.lines import LineFile
from fullcp.experiments.measure import COLUMNS, measure
from fullcp.experiments.provenance import commit, device_name
from fullcp.experiments.store import RunFolder, Stored
from fullcp.experiments.uci_methods import Arm
from fullcp.predictors import (
    FullConformalRegressor,
    GridFullConformalRegressor,
    InformedSplitConformalRegressor,
    JackknifePlusRegressor,
    LaplaceRegressor,
    RetrainedFullConformalRegressor,
    SplitConformalRegressor,
)
from fullcp.predictors.base import Predictor
from fullcp.progress import track
from fullcp.training import mlp, replicate, train_ensemble

NAME, TABLE = "synthetic", "synthetic_fullcp"
TRAIN, TEST, REPEATS, EPOCHS = 500, 100, 20, 500
RATES = (1e-2, 1e-5)
Array = NDArray[np.float64]
Say = Callable[[str], None]
Part = tuple[Array, Array]


def draw(seed: int) -> tuple[Part, Part]:
    """Training and test rows: a draw from a Gaussian process, whose noise is ten times larger for one row in ten.

    Examples
    --------
    >>> (X, y), (X_test, y_test) = draw(0)
    >>> X.shape, y_test.shape
    ((500, 1), (100,))
    """
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(TRAIN + TEST)
    K = np.exp(-((x[:, None] - x) ** 2) / 2)
    values, vectors = np.linalg.eigh(K)  # smooth draws: most eigenvalues are rounding
    f = vectors @ (np.sqrt(values.clip(min=0)) * rng.standard_normal(len(x)))
    noise = np.where(rng.random(len(x)) < 0.1, 1.0, 0.1) * rng.standard_normal(len(x))
    X, y = x[:, None], f + noise
    return (X[:TRAIN], y[:TRAIN]), (X[TRAIN:], y[TRAIN:])


class Synthetic:
    """Trains and evaluates what is missing.

    Parameters
    ----------
    repeats, epochs : fewer make it quicker.
    """

    def __init__(self, folder: Path, device: torch.device, say: Say, *, repeats: int = REPEATS, epochs: int = EPOCHS):
        self.device, self.say, self.repeats, self.epochs = device, say, repeats, epochs
        self.store = RunFolder(folder, NAME, {"dataset": NAME, "train": TRAIN, "epochs": epochs, "rates": list(RATES)})
        self.lines = LineFile(folder / NAME / "folds.csv", COLUMNS)

    def train(self) -> None:
        """All networks as one ensemble: on all rows, and on half of them for SCP."""
        missing = self.store.missing("full", list(range(self.repeats)))
        if not missing:
            return
        self.say(f"{NAME}: {2 * len(missing)} networks (full, fit-50), {self.epochs} epochs")
        start = time.perf_counter()
        data, seeds = [], []
        for seed in missing:
            (X, y), _ = draw(seed)
            fit, _ = _halves()
            data += [_tensors(X, y, self.device), _tensors(X[fit], y[fit], self.device)]
            seeds += [seed, 1000 + seed]
        models = [model.to(self.device) for model in replicate(_network, seeds)]
        runs = train_ensemble(
            models, data, l2="marglik", epochs=self.epochs, batch_size=TRAIN, learning_rate=RATES, seed=seeds
        )
        entry = {
            "stage": "tuned",
            "seconds": round(time.perf_counter() - start, 2),
            "networks": len(models),
            "device": device_name(self.device),
            "commit": commit(),
        }
        for k, role in enumerate(("fit-50", "full")):  # `full` last: it says that all are there
            at = range(1 - k, len(models), 2)
            self.store.add(
                role,
                Stored(
                    torch.tensor(missing),
                    torch.stack(
                        [torch.cat([p.detach().reshape(-1) for p in models[i].parameters()]).cpu() for i in at]
                    ),
                    torch.stack([torch.as_tensor(runs[i].l2) for i in at]),
                    torch.tensor([runs[i].noise for i in at], dtype=torch.float64),
                    torch.tensor([runs[i].divergence is not None for i in at]),
                    torch.zeros(len(missing), 0, dtype=torch.float64),
                    [entry],
                ),
            )
        self.say(f"{NAME}: trained in {entry['seconds']} s")

    def evaluate(self, arms: Sequence[Arm], memory: str) -> None:
        """Each method on each data set."""
        done = {(int(line["fold"]), line["method"]) for line in self.lines.read()}
        where = {"device": device_name(self.device), "commit": commit()}
        todo = [(s, arm) for s in range(self.repeats) for arm in arms if (s, arm.name) not in done]
        if todo:
            self.say(f"{NAME}: {len(todo)} evaluations of {', '.join(arm.method for arm in arms)}")
        for seed, arm in track(todo, NAME, len(todo)):
            train, (X, y) = draw(seed)
            lines = measure(lambda seed=seed, arm=arm, train=train: self._make(arm, seed, train, memory), X, y)  # type: ignore[misc]
            of = {"fold": seed, "repeat": seed, "method": arm.name, **where}
            self.lines.append([{**of, **line} for line in lines])

    def _make(self, arm: Arm, seed: int, train: Part, memory: str) -> Predictor:
        role = f"fit-{arm.share}" if arm.share else "full"
        stored = self.store.cached(role)
        at = stored.place(seed)
        model = _network()
        torch.nn.utils.vector_to_parameters(stored.theta[at], model.parameters())
        model.to(self.device)
        l2, noise = stored.l2[at].numpy(), float(stored.noise[at])
        fit, cal = (tuple(part[rows] for part in train) for rows in _halves())
        match arm.method:
            case "LA":
                return LaplaceRegressor(model, "full", l2, noise=noise).fit(*train)
            case "SCP":
                return SplitConformalRegressor(model).conformalize(*cal)
            case "ACP-GN":
                return FullConformalRegressor(model, "full", arm.score, "signed", l2).conformalize(*train)
            case "ACP":
                return GridFullConformalRegressor(model, "full", "signed", l2, candidates=200).conformalize(*train)
            case "informed":
                cp = InformedSplitConformalRegressor(model, "full", arm.score, "signed", l2)
                return cp.fit(*fit).conformalize(*cal)
            case "jackknife+":
                return JackknifePlusRegressor(model, "full", l2=l2).conformalize(*train)
        return RetrainedFullConformalRegressor(
            model, "signed", l2, candidates=50, epochs=self.epochs, learning_rate=RATES, seed=seed, memory=memory
        ).conformalize(*train)


# The paper's five, then ours; scores and residuals of all are those that the paper takes here.
ARMS = (
    Arm("LA"),
    Arm("SCP", share=50),
    Arm("FCP", score="standard"),
    Arm("ACP", score="standard"),
    Arm("ACP-GN", score="standard"),
    Arm("informed", score="standard", share=50),
    Arm("jackknife+"),
)
METHODS = tuple(arm.method for arm in ARMS)


def _network() -> nn.Module:
    return mlp(1, (100,), activation=nn.Tanh)


def _halves() -> tuple[Any, Any]:
    return halves(np.arange(TRAIN))  # rows are drawn independently: any half will do


def _tensors(X: Array, y: Array, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(torch.as_tensor(a, dtype=torch.float32, device=device) for a in (X, y))  # type: ignore[return-value]
