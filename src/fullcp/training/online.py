"""Tuning l2 and noise while the networks train, by the Laplace marginal likelihood: the paper's recipe for small data.

After some epochs, and then every so many, the curvature is computed anew and the hyperparameters take some steps of
Adam up the marginal likelihood, weights as they are; training goes on with the new ones. In the end each network has
the weights and hyperparameters of the best marginal likelihood that was seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import cos, pi
from typing import ClassVar

import torch
from torch import Tensor

from fullcp.inputs import check_choice, check_positive_int
from fullcp.training.watch import Progress
from fullcp.tuning import Ascent, Evidence, evidence_of_many

_MATRICES = 2**30  # bytes for the matrices of the networks that are tuned side by side
_GRADIENTS = 2**26  # bytes for a chunk of their gradients


@dataclass(frozen=True)
class Schedule:
    """When l2 and the noise are tuned during training, and how far; the defaults are the paper's.

    Attributes
    ----------
    burn_in : epochs before the first time.
    every : epochs from one time to the next.
    steps : of Adam, each time.
    learning_rate : (first, last)
        The ends of a cosine schedule over all these steps.
    structure : "layer" or "scalar"
        One prior precision a parameter tensor, or one for all.
    """

    burn_in: int = 100
    every: int = 50
    steps: int = 50
    learning_rate: tuple[float, float] = field(default=(1e-2, 1e-3))
    structure: str = "layer"

    def __post_init__(self) -> None:
        for name in ("burn_in", "every", "steps"):
            check_positive_int(f"tuning.{name}", getattr(self, name))
        check_choice("tuning.structure", self.structure, ("layer", "scalar"))
        first, last = self.learning_rate
        if not 0 < last <= first:
            raise ValueError(f"tuning.learning_rate must be (first, last) with 0 < last <= first, got {(first, last)}")

    def due(self, epoch: int) -> bool:
        """Whether to tune after this many epochs."""
        return epoch >= self.burn_in and (epoch - self.burn_in) % self.every == 0

    def rates(self, epoch: int, epochs: int) -> list[float]:
        """The learning rates of the steps after `epoch` of all `epochs`."""
        first, last = self.learning_rate
        total = self.steps * ((epochs - self.burn_in) // self.every + 1)
        before = self.steps * ((epoch - self.burn_in) // self.every)
        return [last + (first - last) * (1 + cos(pi * t / total)) / 2 for t in range(before, before + self.steps)]


class OnlineTuning:
    """A watch whose criterion is minus the log marginal likelihood, and which changes l2 and noise.

    Parameters
    ----------
    networks : B
    groups : the number of parameter tensors.
    epochs : of the training.
    """

    criterion: ClassVar[str] = "the marginal likelihood"
    patience: ClassVar[None] = None

    def __init__(self, networks: int, groups: int, epochs: int, schedule: Schedule, device: torch.device):
        if epochs < schedule.burn_in:
            raise ValueError(
                f"epochs must be at least tuning.burn_in where l2 is tuned during training, got {epochs} and "
                f"{schedule.burn_in}"
            )
        self.epochs, self.schedule = epochs, schedule
        self.ascent = Ascent(networks, groups if schedule.structure == "layer" else 1, device=device)
        self._epoch = 0

    def due(self, epoch: int) -> bool:
        """Whether to tune after this many epochs."""
        self._epoch = epoch
        return self.schedule.due(epoch)

    def look(self, progress: Progress) -> Tensor:
        """Tune, and give minus the log marginal likelihood (B,).

        A network whose curvature is singular keeps its l2 and noise this time, and has the value inf.
        """
        rates = self.schedule.rates(self._epoch, self.epochs)
        values = []
        for block in self._blocks(progress):
            values.append(self.ascent.climb(_evidence(progress, block, self.schedule.structure), rates, block))
        progress.noise.copy_(self.ascent.log_noise.exp())
        sizes = torch.tensor(progress.stack.sizes, device=progress.l2.device)
        l2 = self.ascent.l2.expand(-1, len(sizes) if self.ascent.l2.shape[1] == 1 else -1)
        progress.l2.copy_(l2.repeat_interleave(sizes, dim=1))
        return -torch.cat(values)

    def keep(self, which: Tensor) -> None:
        """Go on with some of the networks."""
        self.ascent.keep(which)

    def state(self) -> dict[str, Tensor]:
        """Where the ascent is."""
        return self.ascent.state()

    def restore(self, state: dict[str, Tensor]) -> None:
        """Go on from there."""
        self.ascent.restore(state)

    def _blocks(self, progress: Progress) -> Iterator[slice]:
        """Networks whose matrices fit into memory together."""
        groups, n, B = self.ascent.l2.shape[1], progress.pool.width * progress.pool.y.shape[1], len(progress.stack)
        each = 8 * min(progress.stack.size**2, groups * n**2)
        size = max(1, min(B, _MATRICES // each))
        for start in range(0, B, size):
            yield slice(start, min(start + size, B))


def _evidence(progress: Progress, block: slice, structure: str) -> Evidence:
    """The marginal likelihood of some networks on the rows that train them."""
    stack, pool = progress.stack, progress.pool
    theta, rows, counts = stack.theta[block], pool.rows[block], pool.counts[block]
    O = pool.y.shape[1]
    chunk = max(1, _GRADIENTS // (theta.element_size() * theta.numel() * O))

    def chunks() -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, pool.width, chunk):
            places = rows[:, start : start + chunk]
            f, phi = stack.jacobian(pool.x[places], block)
            e = pool.y[places].double() - f.double()
            place = torch.arange(start, start + places.shape[1], device=places.device)
            own = place < counts.unsqueeze(1)
            if not bool(own.all()):
                phi, e = phi * own[:, :, None, None], e * own[:, :, None]
            yield phi, e

    return evidence_of_many(chunks(), theta, stack.sizes, counts * O, structure=structure)
