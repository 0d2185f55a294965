"""What every curvature structure answers: leverages, cross leverages and solves with H."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class Query:
    """What the curvature knows about m test points.

    Attributes
    ----------
    leverage : Tensor (m, O, O)
        V = phi H^-1 phi^T of each test point; h for one output.
    cross : callable
        Takes a slice of n training rows, returns their cross leverages C_i = phi_i H^-1 phi^T, (m, n, O, O).
    """

    leverage: Tensor
    cross: Callable[[slice], Tensor]


class Curvature(Protocol):
    """H = sum_i phi_i phi_i^T + diag(l2) over the N training rows, in float64.

    Attributes
    ----------
    name : what it is, in words.
    stands_alone : whether `leverage` and `solve` need no training row.
    """

    name: str
    stands_alone: bool

    def slack(self) -> Tensor:
        """I - V_i of the training rows, (N, O, O): 1 - h_i for one output.

        Kept in this form because every formula wants it so, and some structures have it without cancellation.
        """

    def leverage(self, phi: Tensor) -> Tensor:
        """V = phi H^-1 phi^T of test points phi (m, O, D): (m, O, O).

        Here and in `query`, what `look_at` gives of them: where phi is too large, they come as they are, (m, ...).
        """

    def query(self, phi: Tensor) -> Query:
        """Leverages and cross leverages of test points phi (m, O, D)."""

    def solve(self, vectors: Tensor) -> Tensor:
        """H^-1 times vectors (D,) or (D, m)."""

    def refine(self, e: Tensor, weights: Tensor, *, exactly: bool = True) -> tuple[Tensor, Tensor]:
        """The step Delta (D,) from weights theta (D,) to the ridge solution, and the residuals e - phi Delta (N, O).

        H Delta = phi^T e - diag(l2) theta. Without `exactly`, the size of the change is all that is wanted.
        """

    def state(self) -> dict[str, Tensor]:
        """The tensors from which the structure can be restored without another fit."""


class WhiteningCurvature(Curvature, Protocol):
    """A curvature that knows a root of H, and stands alone."""

    def whiten(self, phi: Tensor) -> Tensor:
        """Rows psi with psi psi^T = phi H^-1 phi^T, for phi (m, O, D): (m, O, D)."""


class NotPositiveDefiniteError(ValueError):
    """H cannot be factorised: the message says which l2 or which rows are to blame."""
