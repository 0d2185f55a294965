"""The paper's protocol for each of its data sets: splits, network, training; declared, not run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fullcp.data import DATASETS, Standardizer, Table, cross_validation, halves, random_splits

LEVELS = (0.9, 0.95, 0.99)
SHARES = (50, 25)  # per cent of the training part that calibrate
_SMALL_ROWS = 5000  # up to here residuals="auto" takes absolute residuals; the paper's sets have 1,599 or 8,192
Rows = NDArray[np.int64]
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Protocol:
    """How a data set is split and its networks are trained.

    Attributes
    ----------
    folds : of cross-validation; 0 is one random split of 90 and 10 per cent a repeat.
    epochs : of all networks but those of the grid.
    grid_epochs : of the networks that choose l2 from the grid; 0 tunes it by the marginal likelihood in training.
    rates : learning rates of networks that predict y (and of all networks where l2 comes from the grid).
    plain_rates : of the others: the base of split + refine, residual sizes, quantiles.
    residuals : of full conformal methods.
    """

    dataset: str
    group: str
    hidden: tuple[int, ...]
    folds: int
    repeats: int
    epochs: int
    grid_epochs: int
    rates: tuple[float, float]
    plain_rates: tuple[float, float]
    residuals: str
    batch_size: int = 256
    seed: int = 0

    @property
    def tunes_in_training(self) -> bool:
        """Whether l2 and noise come from the marginal likelihood during training."""
        return self.grid_epochs == 0

    def training_facts(self) -> dict[str, Any]:
        """What decides the weights of a fold's networks, for JSON: all but the number of repeats."""
        facts = {**asdict(self), "hidden": list(self.hidden)}
        del facts["repeats"], facts["residuals"]
        return {**facts, "rates": list(self.rates), "plain_rates": list(self.plain_rates)}


_SMALL = Protocol("", "small", (50,), 10, 10, 5000, 0, (1e-2, 1e-5), (1e-3, 1e-5), "absolute")
_GROUPS = {
    "small": _SMALL,
    "medium": replace(_SMALL, group="medium", folds=0, repeats=20, residuals="signed"),
    "large": replace(
        _SMALL,
        group="large",
        hidden=(50, 50, 50),
        folds=0,
        repeats=20,
        epochs=1000,
        grid_epochs=500,
        plain_rates=(1e-2, 1e-5),
        residuals="signed",
    ),
}


def protocol_of(dataset: str, *, repeats: int | None = None, epochs: int | None = None) -> Protocol:
    """The protocol of a data set; fewer repeats or epochs make it quicker.

    Examples
    --------
    >>> protocol_of("yacht").folds, protocol_of("protein").hidden
    (10, (50, 50, 50))
    """
    return _shortened(replace(_GROUPS[DATASETS[dataset].group], dataset=dataset), repeats, epochs)


def protocol_by_size(name: str, rows: int, *, repeats: int | None = None, epochs: int | None = None) -> Protocol:
    """The paper's protocol for a table that is not of its sets: that of its small or medium ones, by number of rows.

    Examples
    --------
    >>> protocol_by_size("houses", 500).folds, protocol_by_size("houses", 9000).folds
    (10, 0)
    """
    group = "small" if rows <= _SMALL_ROWS else "medium"
    return _shortened(replace(_GROUPS[group], dataset=name), repeats, epochs)


def _shortened(found: Protocol, repeats: int | None, epochs: int | None) -> Protocol:
    if repeats is not None:
        found = replace(found, repeats=repeats)
    if epochs is not None:
        found = replace(found, epochs=epochs, grid_epochs=min(found.grid_epochs, max(1, epochs // 2)))
    return found


@dataclass(frozen=True)
class Fold:
    """One split: `number` counts folds over all repeats, and is what seeds depend on."""

    number: int
    repeat: int
    train: Rows
    test: Rows

    def parts(self, share: int) -> tuple[Rows, Rows]:
        """Training rows for fitting, and for calibration (`share` per cent of them)."""
        return halves(self.train, share=share / 100)


def folds_of(protocol: Protocol, rows: int) -> list[Fold]:
    """All folds of all repeats; those of a repeat do not depend on how many follow."""
    return [Fold(number, repeat, train, test) for number, (repeat, train, test) in enumerate(_splits(protocol, rows))]


def _splits(protocol: Protocol, rows: int) -> Iterator[tuple[int, Rows, Rows]]:
    if protocol.folds:
        for repeat in range(protocol.repeats):
            for train, test in cross_validation(rows, protocol.folds, repeat, seed=protocol.seed):
                yield repeat, train, test
    else:
        for repeat, (train, test) in enumerate(random_splits(rows, protocol.repeats, seed=protocol.seed)):
            yield repeat, train, test


@dataclass(frozen=True)
class ScaledFold:
    """A table standardised by the training part of a fold: X (N, I), y (N,), and the way back for y."""

    fold: Fold
    X: Array
    y: Array
    scale: Standardizer

    @classmethod
    def of(cls, table: Table, fold: Fold) -> ScaledFold:
        """Standardise by all rows of the training part, calibration rows among them."""
        x_scale, y_scale = Standardizer.of(table.X[fold.train]), Standardizer.of(table.y[fold.train])
        return cls(fold, x_scale.transform(table.X), y_scale.transform(table.y), y_scale)

    def rows(self, which: Rows) -> tuple[Array, Array]:
        """Inputs and targets of some rows."""
        return self.X[which], self.y[which]

    def unseen(self, which: Rows, share: int) -> tuple[Array, Array]:
        """Those of rows that a network of this calibration share was not trained on."""
        return self.rows(which)
