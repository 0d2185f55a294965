"""Choosing l2 from a grid by the loss on rows held out: all networks and all values train as one ensemble."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from fullcp.inputs import ModelTraits, check_positive_int, model_traits, read_rows
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
    epochs: int = 500,
    **recipe: Any,
) -> list[GridSearch]:
    """Train each network with each l2 on most of its rows, and choose by the mean loss on the others.

    The networks given are not changed: train them on all rows with the value that was found.

    Parameters
    ----------
    models : list of B modules of one architecture
    data : (X, y), or list of B such pairs
    grid : values of l2, in sum scale
    validation : float in (0, 1)
        The share of the rows that is held out, drawn at random for each network.
    seed : int, or sequence of B ints
        Of the rows held out, and of the order of the others.
    loss, epochs, recipe : as in `train_ensemble`.

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
    models = list(models)
    seeds = [seed + b for b in range(len(models))] if isinstance(seed, int) else list(seed)
    if not 0 < validation < 1:
        raise ValueError(f"validation must be a share between 0 and 1, got {validation!r}")
    check_positive_int("epochs", epochs)
    pairs = pairs_of(data, len(models), "data")
    traits = model_traits(models[0])
    split = [_split(X, y, traits, validation, s) for (X, y), s in zip(pairs, seeds, strict=True)]
    copies = [copy.deepcopy(model) for model in models for _ in values]
    training, held = ([part[i] for part in split for _ in values] for i in (0, 1))
    runs = run_all(
        copies,
        training,
        l2=list(values) * len(models),
        seed=[s for s in seeds for _ in values],
        loss=loss,
        epochs=epochs,
        **recipe,
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


def _split(X: Any, y: Any, traits: ModelTraits, validation: float, seed: int) -> tuple[Any, Any]:
    """The rows that train and the rows held out, each as a pair."""
    rows = read_rows(X, y, traits)
    assert rows.y is not None
    N = len(rows.x)
    held = max(1, round(validation * N))
    if N - held < 1:
        raise ValueError(f"X has {N} row(s): too few to hold out a share of {validation}")
    order = torch.from_numpy(np.random.default_rng(seed).permutation(N)).to(rows.x.device)
    parts = order[held:], order[:held]
    return tuple((rows.tensor()[part], rows.y[part]) for part in parts)  # type: ignore[return-value]
