"""The paper's recipe for one network or for many at once: Adam on mini-batches, a cosine schedule, l2 in sum scale."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fullcp.curvature import expand_l2
from fullcp.inputs import check_positive_int
from fullcp.progress import track
from fullcp.training.arguments import per_network, read_models, read_noise, read_rates, read_seeds
from fullcp.training.build import build_stack
from fullcp.training.checkpoint import Checkpoint, read_path
from fullcp.training.losses import SquaredLoss, check_criterion, check_loss, read_loss, wants_same_shape
from fullcp.training.online import OnlineTuning, Schedule
from fullcp.training.pool import Pool, read_pool
from fullcp.training.run import Divergence, Outcome, Recipe, Run
from fullcp.training.stack import trainable
from fullcp.training.threads import one_thread_if_small
from fullcp.training.watch import Validation, Watch, probe


class DivergenceWarning(UserWarning):
    """Some networks of an ensemble diverged; the others trained on."""


@dataclass(frozen=True)
class Training:
    """How the training of one network went.

    Attributes
    ----------
    losses : list of float
        The objective a row, one value an epoch.
    l2 : the penalty of the network as it is now: what was given, or what tuning found.
    noise : the standard deviation of the noise, likewise.
    epochs : how many were trained; fewer than asked for where the network stopped early.
    best_epoch : after how many epochs the weights are those of now; None: the last.
    best : the criterion there: the validation loss, or minus the log marginal likelihood.
    divergence : where the loss ceased to be finite, None if it did not. Such a network has the weights it came with.
    tuned : whether l2 and the noise were tuned during training.
    """

    losses: list[float]
    l2: Any
    noise: float
    epochs: int
    best_epoch: int | None = None
    best: float | None = None
    divergence: Divergence | None = None
    tuned: bool = False

    @property
    def log_marginal_likelihood(self) -> float | None:
        """Of the weights and hyperparameters kept, where l2 was tuned during training."""
        return -self.best if self.best is not None and self.tuned else None


def train(
    model: nn.Module,
    X: object,
    y: object = None,
    *,
    l2: Any = 1.0,
    noise: float = 1.0,
    epochs: int = 1000,
    batch_size: int = 256,
    learning_rate: tuple[float, float] = (1e-2, 1e-5),
    seed: int = 0,
    loss: Any = "squared",
    validation: Any = None,
    patience: int | None = None,
    criterion: Any = None,
    tuning: Schedule | None = None,
    checkpoint: str | Path | None = None,
) -> Training:
    """Minimise sum_i 1/2 |y_i - f_i|^2 + 1/2 theta^T diag(l2) theta in place.

    The same `l2` then goes to the predictors. With `l2="marglik"` it is tuned during training, together with the
    noise, by the Laplace marginal likelihood, and the weights of the best value are kept: the paper's recipe for small
    data. The result says which l2 that was.

    Parameters
    ----------
    model : (n, ...) -> (n,) or (n, O)
    X : array, tensor or frame (N, ...), or a DataLoader of (inputs, targets)
    y : (N,) or (N, O); left out with a DataLoader
    l2 : float, array of one value per parameter tensor or per parameter, or "marglik"
    noise : float
        Standard deviation of the noise. It scales the whole objective and leaves its minimum where it is. Where l2 is
        tuned, so is the noise; the scale stays.
    epochs, batch_size : int
        The last, smaller batch of an epoch is used too; a single row joins the batch before.
    learning_rate : (first, last)
        The ends of a cosine schedule over the epochs.
    seed : of the order of the rows, and of what layers such as dropout draw; torch's own state is left alone.
    loss : "squared", or a callable
        Takes outputs (..., O) and targets (..., K) and returns the loss of each row (...), in place of 1/2 |y - f|^2.
    validation : (X, y), or a DataLoader
        Rows that do not train: the weights with the smallest loss on them are kept.
    patience : int
        Stop after so many epochs without a smaller validation loss.
    criterion : "squared", or a callable
        What to judge by on the validation rows in place of `loss`: takes and returns the same, and needs no gradient.
    tuning : `Schedule`
        When and how long "marglik" tunes.
    checkpoint : path
        A file that is written every ten seconds: the same call after an interruption goes on from there. It knows the
        networks, the loss with all that it refers to, the data and the settings, and serves no other run.

    Examples
    --------
    >>> X = torch.randn(64, 2)
    >>> run = train(nn.Linear(2, 1), X, X.sum(1), l2=0.1, epochs=50)
    >>> run.losses[-1] < run.losses[0]
    True
    """
    (run,) = run_all(
        [model],
        (X, y),
        l2=[l2],
        noise=noise,
        epochs=epochs,
        batch_size=batch_size,
        learning_rate=learning_rate,
        seed=seed,
        loss=loss,
        validation=validation,
        patience=patience,
        criterion=criterion,
        tuning=tuning,
        checkpoint=checkpoint,
    )
    if run.divergence is not None:
        raise ValueError(f"training diverged: {run.divergence}; a smaller learning rate helps, or standardised data")
    return run


def train_ensemble(
    models: Sequence[nn.Module],
    data: Any,
    *,
    l2: Any = 1.0,
    noise: float | Sequence[float] = 1.0,
    epochs: int = 1000,
    batch_size: int = 256,
    learning_rate: tuple[float, float] = (1e-2, 1e-5),
    seed: int | Sequence[int] = 0,
    loss: Any = "squared",
    validation: Any = None,
    patience: int | None = None,
    criterion: Any = None,
    tuning: Schedule | None = None,
    checkpoint: str | Path | None = None,
) -> list[Training]:
    """Train many networks of one architecture at once, each as `train` would train it alone.

    A hundred small networks take some twenty times less than one after the other.

    Parameters
    ----------
    models : list of B modules of one architecture, each with its own initial weights; see `replicate`.
    data : (X, y) or a DataLoader, or list of B of these
        A tuple of two is the data of all networks, a list holds a pair or DataLoader a network.
    l2 : float, array of one value per parameter tensor or per parameter, or "marglik"; or a list of B of these numbers
        A list holds a penalty a network; what goes for all networks is a number, array or tensor.
    noise : float, or sequence of B floats
    seed : int, or sequence of B ints
        Of the order of the rows; from one number s network b takes s + b. What layers such as dropout draw comes from
        one stream for all, begun by the first of the seeds: the same call gives the same networks, but a network with
        dropout is not the one that trained alone, as all others are to rounding.
    validation : (X, y) or a DataLoader, or list of B of these

    The other parameters are those of `train`.

    Returns
    -------
    list of B `Training`
        A network that diverges is taken out, keeps the weights it came with, and says so in `divergence`; the others
        train on.

    Examples
    --------
    >>> X = torch.randn(64, 2)
    >>> models = [nn.Linear(2, 1) for _ in range(3)]
    >>> runs = train_ensemble(models, (X, X.sum(1)), l2=[0.1, 1.0, 10.0], epochs=50)
    >>> len(runs)
    3
    """
    models = read_models(models)
    runs = run_all(
        models,
        data,
        l2=per_network("l2", l2, len(models)),
        noise=noise,
        epochs=epochs,
        batch_size=batch_size,
        learning_rate=learning_rate,
        seed=seed,
        loss=loss,
        validation=validation,
        patience=patience,
        criterion=criterion,
        tuning=tuning,
        checkpoint=checkpoint,
    )
    lost = {b: run.divergence for b, run in enumerate(runs) if run.divergence is not None}
    if len(lost) == len(runs):
        raise ValueError(f"training diverged, every network of {len(runs)}; network 0: {lost[0]}")
    if lost:
        which = "; ".join(f"network {b}: {divergence}" for b, divergence in list(lost.items())[:5])
        warnings.warn(f"{len(lost)} of {len(runs)} networks diverged; {which}", DivergenceWarning, stacklevel=2)
    return runs


def run_all(
    models: list[nn.Module],
    data: Any,
    *,
    l2: list[Any],
    noise: Any = 1.0,
    epochs: int = 1000,
    batch_size: int = 256,
    learning_rate: tuple[float, float] = (1e-2, 1e-5),
    seed: Any = 0,
    loss: Any = "squared",
    validation: Any = None,
    patience: int | None = None,
    criterion: Any = None,
    tuning: Schedule | None = None,
    checkpoint: str | Path | None = None,
) -> list[Training]:
    """Train networks with a penalty each; the results say which of them diverged."""
    recipe = Recipe(
        check_positive_int("epochs", epochs), check_positive_int("batch_size", batch_size), read_rates(learning_rate)
    )
    models = read_models(models)
    checkpoint = None if checkpoint is None else read_path(checkpoint)
    loss = read_loss(loss)
    seeds = read_seeds(seed, len(models))
    noises = read_noise(noise, len(models))
    pool = read_pool(models, data, same_shape=wants_same_shape(loss))
    tuned = any(isinstance(value, str) for value in l2)
    penalty = _expand(l2, models, pool.x.device)
    judge = loss if criterion is None else read_loss(criterion, "criterion")
    watch = _read_watch(models, pool, loss, judge, validation, patience, tuned, tuning, recipe)
    stack = build_stack(models, pool.x)
    check_loss(loss, *probe(stack, pool))
    if criterion is not None:
        if validation is None:
            raise ValueError("criterion needs validation=(X, y): rows to judge by")
        check_criterion(judge, *probe(stack, pool), "criterion")
    run = Run(
        stack,
        pool,
        loss=loss,
        l2=penalty,
        noise=noises.to(pool.x.device),
        recipe=recipe,
        seeds=seeds.to(pool.x.device),
        watch=watch,
    )
    complete(run, checkpoint)
    outcomes = [run.outcomes[b] for b in range(len(models))]
    for model, outcome in zip(models, outcomes, strict=True):
        if outcome.weights is not None:
            run.stack.put(model, outcome.weights)
    return [_training(run, b, outcome, l2[b]) for b, outcome in enumerate(outcomes)]


def complete(run: Run, checkpoint: str | Path | None = None) -> None:
    """Train to the end, from where the file of an earlier call left off."""
    file = None if checkpoint is None else Checkpoint(checkpoint, run)
    left = run.recipe.epochs - run.epoch
    with one_thread_if_small(len(run.stack) * min(run.recipe.batch_size, run.pool.width) * run.stack.size):
        for _ in track(range(left), "training", left):
            if run.finished:
                break
            run.advance()
            if file is not None:
                file.update(run)


def _training(run: Run, b: int, outcome: Outcome, given: Any) -> Training:
    """What the user is told of network b."""
    l2 = given
    tuned = isinstance(given, str)
    if tuned:
        l2 = np.array([part[0].item() for part in torch.split(outcome.l2, run.stack.sizes)])
    losses = run.losses[: outcome.epochs, b].tolist()
    best = outcome.best_epoch, outcome.criterion
    return Training(losses, l2, outcome.noise, outcome.epochs, *best, divergence=outcome.divergence, tuned=tuned)


def _read_watch(
    models: list[nn.Module],
    pool: Pool,
    loss: Any,
    criterion: Any,
    validation: Any,
    patience: int | None,
    tuned: bool,
    tuning: Schedule | None,
    recipe: Recipe,
) -> Watch | None:
    if patience is not None:
        check_positive_int("patience", patience)
        if validation is None:
            raise ValueError("patience needs validation=(X, y): rows that say when to stop")
    if tuning is not None and not isinstance(tuning, Schedule):
        raise TypeError(f"tuning must be a Schedule, got {type(tuning).__name__}")
    if tuning is not None and not tuned:
        raise ValueError("tuning says when l2='marglik' is tuned, and l2 is given: leave one of them out")
    if tuned:
        if validation is not None:
            raise ValueError("validation and l2='marglik' both choose the weights to keep: give one of them")
        if not isinstance(loss, SquaredLoss):
            raise ValueError("l2='marglik' needs loss='squared': the marginal likelihood is that of Gaussian noise")
        groups = len(trainable(models[0]))
        return OnlineTuning(len(models), groups, recipe.epochs, tuning or Schedule(), pool.x.device)
    if validation is None:
        return None
    held = read_pool(models, validation, same_shape=wants_same_shape(criterion), name="validation", like=pool)
    return Validation(held, criterion, patience=patience)


def _expand(l2: list[Any], models: list[nn.Module], device: torch.device) -> Tensor:
    """The penalties (B, P); where they will be tuned, 1."""
    if all(isinstance(value, str) for value in l2):
        bad = next((value for value in l2 if value != "marglik"), None)
        if bad is not None:
            raise ValueError(f"l2 must be 'marglik', a number or an array of numbers, got {bad!r}")
        l2 = [1.0] * len(l2)
    elif any(isinstance(value, str) for value in l2):
        raise ValueError("l2='marglik' goes for all networks or for none")
    return torch.stack([expand_l2(value, trainable(model), device) for value, model in zip(l2, models, strict=True)])
