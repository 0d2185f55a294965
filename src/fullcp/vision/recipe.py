"""How detectors are trained: stochastic gradients with momentum, warm-up and cosine; smooth L1 and logistic loss."""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, pi

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, smooth_l1_loss

from fullcp.inputs import check_positive_int


class DivergedError(RuntimeError):
    """The loss of a detector is no longer finite; the message says which, and what to do."""


@dataclass(frozen=True)
class Recipe:
    """The paper's recipe, but for the number of epochs where time is short.

    Attributes
    ----------
    warm_up : epochs in which the learning rate rises step by step; shorter runs take a tenth of their epochs at most.
    flips : whether every image is flipped from left to right half of the time, with its box.
    """

    epochs: int = 200
    batch_size: int = 128
    learning_rate: float = 1e-2
    warm_up: int = 5
    momentum: float = 0.9
    weight_decay: float = 5e-4
    flips: bool = True

    def __post_init__(self) -> None:
        check_positive_int("epochs", self.epochs)
        check_positive_int("batch_size", self.batch_size)
        check_positive_int("warm_up", self.warm_up, least=0)
        if not 0 < self.learning_rate < float("inf"):
            raise ValueError(f"learning_rate must be positive and finite, got {self.learning_rate!r}")

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of step number `step` where an epoch has `steps`."""
        rising = min(self.warm_up, self.epochs // 10) * steps
        if step < rising:
            return self.learning_rate * (step + 1) / rising
        return self.learning_rate * (1 + cos(pi * (step - rising) / (self.epochs * steps - rising))) / 2

    def optimizer(self, parameters: list[Tensor]) -> torch.optim.SGD:
        """Nesterov's momentum with weight decay; one kernel for all tensors on a GPU."""
        return torch.optim.SGD(
            parameters,
            lr=self.learning_rate,
            momentum=self.momentum,
            nesterov=self.momentum > 0,
            weight_decay=self.weight_decay,
            fused=parameters[0].is_cuda,
        )


def detection_loss(boxes: Tensor, logits: Tensor, targets: Tensor, classes: Tensor) -> Tensor:
    """Smooth L1 of boxes (..., n, 4) in standardised units plus the logistic loss of the class (..., n), (...,).

    Both are means over the n images.
    """
    box = smooth_l1_loss(boxes.float(), targets, reduction="none").mean((-2, -1))
    return box + binary_cross_entropy_with_logits(logits.float(), classes.float(), reduction="none").mean(-1)


def check_converging(loss: Tensor, epoch: int, names: list[str]) -> None:
    """Stop where the mean loss of an epoch, one number a network, is not finite."""
    bad = (~loss.isfinite()).nonzero()[:, 0].tolist()
    if bad:
        who = ", ".join(names[i] for i in bad)
        raise DivergedError(f"training of {who} diverged in epoch {epoch + 1}: take a smaller learning_rate")
