"""Something that looks at the networks while they train, and says how good they are: the best weights are kept."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from fullcp.training.pool import Pool
from fullcp.training.stack import Stack


class Progress(Protocol):
    """What a watch may look at and, for the penalty and the noise, change."""

    stack: Stack
    pool: Pool
    l2: Tensor  # (B, P), sum scale
    noise: Tensor  # (B,)


class Watch(Protocol):
    """A criterion that is evaluated now and then during training.

    Attributes
    ----------
    criterion : what the value is, in words.
    patience : after how many evaluations without a better value a network stops; None: never.
    """

    criterion: ClassVar[str]

    @property
    def patience(self) -> int | None:
        """See above."""

    def due(self, epoch: int) -> bool:
        """Whether to look after this many epochs."""

    def look(self, progress: Progress) -> Tensor:
        """The criterion of each network, (B,); lower is better, and infinite where there is no value."""

    def keep(self, which: Tensor) -> None:
        """Go on with some of the networks."""

    def state(self) -> dict[str, Tensor]:
        """Tensors for `restore`."""

    def restore(self, state: dict[str, Tensor]) -> None:
        """Take up what `state` gave."""


class Validation:
    """The mean loss on rows that do not train."""

    criterion: ClassVar[str] = "the validation loss"

    def __init__(self, pool: Pool, loss: Any, *, patience: int | None = None, every: int = 1):
        self.pool = pool
        self.loss = loss
        self.patience = patience
        self.every = every

    def due(self, epoch: int) -> bool:
        """Every so many epochs."""
        return epoch % self.every == 0

    def look(self, progress: Progress) -> Tensor:
        """Mean loss of each network, (B,)."""
        return mean_loss(progress.stack, self.pool, self.loss)

    def keep(self, which: Tensor) -> None:
        """Go on with some of the networks."""
        self.pool = self.pool.keep(which)

    def state(self) -> dict[str, Tensor]:
        """Nothing to remember."""
        return {}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Nothing was remembered."""


def probe(stack: Stack, pool: Pool) -> tuple[Tensor, Tensor]:
    """Outputs f (2, 3, O) and targets y (2, 3, K) of a few rows, to try a loss on: no two sizes are alike by chance."""
    places = pool.rows[:, torch.arange(3, device=pool.rows.device) % pool.width]
    f, y = stack.predict(pool.x[places])[:1], pool.y[places][:1]
    return f.repeat(2, 1, 1), y.repeat(2, 1, 1)


def mean_loss(stack: Stack, pool: Pool, loss: Any, *, chunk: int = 2048) -> Tensor:
    """The mean loss of each network on its own rows of a pool, as in evaluation, (B,)."""
    total = pool.y.new_zeros(len(stack), dtype=torch.float64)
    for start in range(0, pool.width, chunk):
        places = pool.rows[:, start : start + chunk]
        own = torch.arange(start, start + places.shape[1], device=places.device) < pool.counts.unsqueeze(1)
        losses = loss(stack.predict(pool.x[places]), pool.y[places])
        total += torch.where(own, losses, 0).double().sum(1)
    return total / pool.counts
