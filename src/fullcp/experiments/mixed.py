"""Networks of a number and networks of quantiles in one ensemble: their losses side by side.

Both have an output a quantile. A network of a number uses the first; the others have weights of zero, get no gradient
and stay so, and are cut off in the end. Its training is that of a network with one output, to the last bit but for
the order of sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fullcp.training import PinballLoss

NUMBER, QUANTILES = 0.0, 1.0


class MixedLoss:
    """The loss of a row (target, kind): half the squared error of the first output, or the mean pinball loss of all."""

    same_shape: ClassVar[bool] = False

    def __init__(self, quantiles: Sequence[float]):
        self.pinball = PinballLoss(quantiles)

    def __repr__(self) -> str:
        return f"MixedLoss({list(self.pinball.quantiles)})"

    def __call__(self, f: Tensor, y: Tensor) -> Tensor:
        """Losses (...) of outputs f (..., K) for y (..., 2)."""
        return self.gradient(f, y)[0]

    def gradient(self, f: Tensor, y: Tensor) -> tuple[Tensor, Any]:
        """Losses (...) and their gradients in f (..., K)."""
        target, kind = y[..., :1], y[..., 1:]
        losses, g = self.pinball.gradient(f, target)
        r = f[..., :1] - target
        numbers = torch.zeros_like(f)
        numbers[..., :1] = r
        losses = torch.where(kind[..., 0] == NUMBER, r[..., 0].square() / 2, losses)
        return losses, torch.where(kind == NUMBER, numbers, g)


def widened(small: nn.Module, wide: nn.Module) -> nn.Module:
    """`wide` with the weights of `small`, a chain of the same layers but for one output; further outputs are zero."""
    with torch.no_grad():
        for p, q in zip(small.parameters(), wide.parameters(), strict=True):
            q.zero_()
            q[tuple(slice(0, size) for size in p.shape)] = p
    return wide


def narrowed(wide: nn.Module, small: nn.Module) -> nn.Module:
    """The way back."""
    with torch.no_grad():
        for p, q in zip(small.parameters(), wide.parameters(), strict=True):
            p.copy_(q[tuple(slice(0, size) for size in p.shape)])
    return small
