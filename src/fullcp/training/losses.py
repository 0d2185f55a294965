"""Losses of one row, for stacks of networks: value and gradient in the outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

RowLoss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class SquaredLoss:
    """1/2 |y - f|^2."""

    same_shape: ClassVar[bool] = True

    def __call__(self, f: Tensor, y: Tensor) -> Tensor:
        """Loss of each row, (...,) from f and y (..., O)."""
        return (f - y).square().sum(-1) / 2

    def gradient(self, f: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Losses (...,) and their gradients in f (..., O)."""
        r = f - y
        return r.square().sum(-1) / 2, r


@dataclass(frozen=True)
class PinballLoss:
    """The mean over quantiles tau_k of max(tau_k (y - f_k), (tau_k - 1) (y - f_k)).

    The outputs are quantiles of one target.

    Parameters
    ----------
    quantiles : sequence of K floats in (0, 1)
    """

    quantiles: Sequence[float]
    same_shape: ClassVar[bool] = False

    def __post_init__(self) -> None:
        taus = tuple(float(tau) for tau in self.quantiles)
        if not taus or not all(0 < tau < 1 for tau in taus):
            raise ValueError(f"quantiles must lie strictly between 0 and 1, got {self.quantiles!r}")
        object.__setattr__(self, "quantiles", taus)

    def __call__(self, f: Tensor, y: Tensor) -> Tensor:
        """Loss of each row, (...,) from f (..., K) and y (..., 1)."""
        return self.gradient(f, y)[0]

    def gradient(self, f: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Losses (...,) and their gradients in f (..., K)."""
        tau = _on_device(tuple(self.quantiles), f.dtype, f.device)
        g = torch.where(y > f, -tau, 1 - tau) / len(self.quantiles)
        return ((f - y) * g).sum(-1), g


@lru_cache(maxsize=64)
def _on_device(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers as a tensor, made once: a CUDA graph cannot record a copy from the host."""
    return torch.tensor(values, dtype=dtype, device=device)


class _UserLoss:
    """A loss that a user wrote, differentiated by autograd."""

    same_shape = False

    def __init__(self, function: RowLoss):
        self.function = function

    def __repr__(self) -> str:
        name = getattr(self.function, "__qualname__", type(self.function).__qualname__)
        return f"{self.function.__module__}.{name}"

    def __call__(self, f: Tensor, y: Tensor) -> Tensor:
        return self.function(f, y)

    def gradient(self, f: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            f = f.detach().requires_grad_()
            losses = self.function(f, y)
            (g,) = torch.autograd.grad(losses.sum(), f)
        return losses.detach(), g


def read_loss(loss: object, name: str = "loss") -> Any:
    """The loss that the user names, or brings."""
    if isinstance(loss, str) and loss == "squared":
        return SquaredLoss()
    if not callable(loss):
        raise TypeError(
            f"{name} must be 'squared' or a callable that takes outputs (..., O) and targets (..., K) and returns one "
            f"number a row (...), got {loss!r}"
        )
    return loss if hasattr(loss, "gradient") else _UserLoss(loss)


def wants_same_shape(loss: Any) -> bool:
    """Whether the targets must have a column an output."""
    return bool(getattr(loss, "same_shape", False))


def check_loss(loss: Any, f: Tensor, y: Tensor) -> None:
    """Refuse a loss that does not give one number a row, and one gradient an output, for f (B, n, O) and y (B, n, K).

    Broadcast against the weights of the rows, what has another shape would train something else without a word.
    """
    check_criterion(loss, f, y, "loss")
    losses, g = _tried(lambda: loss.gradient(f.clone(), y), f, y, "loss")
    _check_values(losses, f, "the gradient() of loss")
    if not isinstance(g, Tensor) or g.shape != f.shape:
        shape = tuple(g.shape) if isinstance(g, Tensor) else type(g).__name__
        raise ValueError(f"the gradient() of loss gives {shape} for outputs of shape {tuple(f.shape)}, not theirs")


def check_criterion(criterion: Any, f: Tensor, y: Tensor, name: str) -> None:
    """Refuse a criterion that does not give one number a row; it need have no gradient."""
    _check_values(_tried(lambda: criterion(f.clone(), y), f, y, name), f, name)


def _tried(function: Callable[[], Any], f: Tensor, y: Tensor, name: str) -> Any:
    try:
        return function()
    except Exception as error:  # whatever a user's function may raise
        raise ValueError(
            f"{name} cannot be computed for outputs {tuple(f.shape)} and targets {tuple(y.shape)}: {error}"
        ) from error


def _check_values(found: Any, f: Tensor, name: str) -> None:
    if not isinstance(found, Tensor):
        raise TypeError(f"{name} must return a tensor, one number a row, got {type(found).__name__}")
    if found.shape != f.shape[:-1]:
        raise ValueError(
            f"{name} returns a tensor of shape {tuple(found.shape)} for outputs of shape {tuple(f.shape)}; wanted is "
            f"{tuple(f.shape[:-1])}, one number a row: use reduction='none' and sum over the last dimension"
        )
