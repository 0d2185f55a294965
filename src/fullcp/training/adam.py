"""Adam on a matrix of weights, one row a network."""

from __future__ import annotations

import torch
from torch import Tensor

_BETA1, _BETA2, _EPS = 0.9, 0.999, 1e-8


class Adam:
    """Moments of the gradients of B networks with P weights each.

    The learning rate and the bias corrections enter as a pair of tensors, so that a recorded step can be played again.
    """

    def __init__(self, theta: Tensor):
        self.mean = torch.zeros_like(theta)
        self.square = torch.zeros_like(theta)
        self.steps = torch.zeros(len(theta), dtype=torch.float64)  # taken by each network; on the CPU
        self._room = torch.empty_like(theta)

    def coefficients(self, rate: float, active: Tensor) -> tuple[Tensor, Tensor]:
        """What the steps of an epoch need: (S, B, 1) factors of the step, and of the root of the squares.

        Parameters
        ----------
        active : Tensor (S, B), bool
            Which networks take part in each of the S steps.
        """
        t = self.steps + active.double().cumsum(0)
        self.steps = t[-1]
        t = t.clamp(min=1)
        sizes = torch.where(active, rate / (1 - _BETA1**t), 0.0)
        roots = (1 - _BETA2**t).rsqrt()
        return tuple(c.to(self.mean.dtype).unsqueeze(2) for c in (sizes, roots))  # type: ignore[return-value]

    def update(self, theta: Tensor, grad: Tensor, size: Tensor, root: Tensor, active: Tensor | None) -> None:
        """One step of theta (B, P) along grad (B, P); `size` and `root` (B, 1) are of `coefficients`.

        `active` (B, 1) is 1 for networks that take part and 0 for others; None where all do.
        """
        if active is None:
            self.mean.lerp_(grad, 1 - _BETA1)
            self.square.mul_(_BETA2).addcmul_(grad, grad, value=1 - _BETA2)
        else:
            self.mean.lerp_(grad, (1 - _BETA1) * active)
            self.square.lerp_(grad.square(), (1 - _BETA2) * active)
        torch.sqrt(self.square, out=self._room)
        self._room.mul_(root).add_(_EPS)
        torch.div(self.mean, self._room, out=self._room)
        theta.sub_(self._room.mul_(size))

    def keep(self, which: Tensor) -> None:
        """Go on with some of the networks."""
        self.mean, self.square, self.steps = self.mean[which], self.square[which], self.steps[which.cpu()]
        self._room = torch.empty_like(self.mean)

    def state(self) -> dict[str, Tensor]:
        """Tensors for `restore`."""
        return {"mean": self.mean, "square": self.square, "steps": self.steps}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Take up what `state` gave."""
        self.mean.copy_(state["mean"])
        self.square.copy_(state["square"])
        self.steps = state["steps"].cpu().clone()
