"""Choosing l2 from a grid by the loss on rows held out: all networks and all values train as one ensemble."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fullcp.inputs import Rows, check_positive_int, model_traits, read_rows
from fullcp.training.arguments import read_models, read_noise, read_seeds
from fullcp.training.build import build_stack
from fullcp.training.losses import read_loss, wants_same_shape
from fullcp.training.pool import pairs_of, read_pool
from fullcp.training.trainer import run_all
from fullcp.training.watch import mean_loss

# The paper's grid for large data sets.
GRID = (1e-2, 1e-1, 1e0, 1e1, 1e2, 1e3, 1e4)


@dataclass(frozen=True)
class GridSearch:
    """What a grid search found for one network.

    Attributes
    ----------
    l2 : the value with the smallest validation loss.
    losses : validation loss of each value of the grid; infinite where training diverged.
    grid : the values.
    """

    l2: float
    losses: tuple[float, ...]
    grid: tuple[float, ...]


def grid_search(
    models: Sequence[nn.Module],
    data: Any,
    grid: Sequence[float] = GRID,
    *,
    validation: float = 0.1,
    seed: int | Sequence[int] = 0,
    loss: Any = "squared",
    noise: float | Sequence[float] = 1.0,
    epochs: int = 500,
    batch_size: int = 256,
    learning_rate: tuple[float, float] = (1e-2, 1e-5),
    checkpoint: str | Path | None = None,
) -> list[GridSearch]:
    """Train each network with each l2 on most of its rows, and choose by the mean loss on the others.

    The networks given are not changed: train them on all rows with the value that was found.

    Parameters
    ----------
    models : list of B modules of one architecture
    data : (X, y) or a DataLoader, or list of B of these
    grid : values of l2, in sum scale
    validation : float in (0, 1)
        The share of the rows that is held out, drawn at random for each network.
    seed : int, or sequence of B ints
        Of the rows held out, and of the order of the others; from one number s network b takes s + b.
    noise : float, or sequence of B floats
    loss, epochs, batch_size, learning_rate, checkpoint : as in `train_ensemble`

    Returns
    -------
    list of B `GridSearch`

    Examples
    --------
    >>> X = torch.randn(80, 2)
    >>> y = X.sum(1) + 0.1 * torch.randn(80)
    >>> (found,) = grid_search([nn.Linear(2, 1)], (X, y), [0.1, 1e4], epochs=200)
    >>> found.l2
    0.1
    """
    values = _read_grid(grid)
    models = read_models(models)
    seeds = read_seeds(seed, len(models)).tolist()
    noises = read_noise(noise, len(models)).tolist()
    if isinstance(validation, bool) or not isinstance(validation, Real):
        raise TypeError(
            "validation must be a share of the rows, between 0 and 1, which are held out of data; got "
            f"{type(validation).__name__}"
        )
    if not 0 < validation < 1:
        raise ValueError(f"validation must be a share between 0 and 1, got {validation!r}")
    check_positive_int("epochs", epochs)
    pairs = pairs_of(data, len(models), "data")
    traits = model_traits(models[0])
    read = {(id(X), id(y)): read_rows(X, y, traits) for X, y in {(id(X), id(y)): (X, y) for X, y in pairs}.values()}
    split = [_split(read[id(X), id(y)], float(validation), s) for (X, y), s in zip(pairs, seeds, strict=True)]
    copies = [copy.deepcopy(model) for model in models for _ in values]
    training, held = ([part[i] for part in split for _ in values] for i in (0, 1))
    runs = run_all(
        copies,
        training,
        l2=list(values) * len(models),
        noise=[sigma for sigma in noises for _ in values],
        seed=[s for s in seeds for _ in values],
        loss=loss,
        epochs=epochs,
        batch_size=batch_size,
        learning_rate=learning_rate,
        checkpoint=checkpoint,
    )
    measure = read_loss(loss)
    pool = read_pool(copies, held, same_shape=wants_same_shape(measure), name="validation")
    losses = mean_loss(build_stack(copies, pool.x), pool, measure).cpu().numpy()
    lost = np.array([run.divergence is not None for run in runs])
    losses = np.where(lost, np.inf, losses).reshape(len(models), len(values))
    found = []
    for b, row in enumerate(losses):
        if not np.isfinite(row).any():
            raise ValueError(f"training of network {b} diverged for every l2: {runs[b * len(values)].divergence}")
        found.append(GridSearch(values[int(row.argmin())], tuple(row.tolist()), values))
    return found


def _read_grid(grid: Sequence[float]) -> tuple[float, ...]:
    try:
        values = tuple(float(value) for value in grid)
    except (TypeError, ValueError) as error:
        raise TypeError(f"grid must be numbers, got {grid!r}") from error
    if not values or not all(0 <= value < float("inf") for value in values):
        raise ValueError(f"grid must hold finite numbers that are not negative, got {grid!r}")
    return values


def _split(rows: Rows, validation: float, seed: int) -> tuple[Any, Any]:
    """The rows that train and the rows held out, each as a pair."""
    assert rows.y is not None
    N = len(rows.x)
    held = max(1, round(validation * N))
    if N - held < 1:
        raise ValueError(f"X has {N} row(s): too few to hold out a share of {validation}")
    order = torch.from_numpy(np.random.default_rng(seed % 2**64).permutation(N)).to(rows.x.device)
    parts = order[held:], order[:held]
    return tuple((rows.tensor()[part], rows.y[part]) for part in parts)  # type: ignore[return-value]
