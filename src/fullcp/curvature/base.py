"""What every curvature structure answers: leverages, cross leverages and solves with H."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fullcp.features import FeatureRows, RowIndex

EVERY = slice(None)
_STEP = 2**24  # bytes of rows to multiply with at a time


class Cross(Protocol):
    """Cross leverages C_i = phi_i H^-1 phi^T of n training rows and some of m test points, (m', n, O, O)."""

    def __call__(self, rows: RowIndex, points: RowIndex = EVERY, /) -> Tensor:
        """The rows as a slice or as indices, and so the points."""


@dataclass(frozen=True)
class Query:
    """What the curvature knows about m test points.

    Attributes
    ----------
    leverage : Tensor (m, O, O)
        V = phi H^-1 phi^T of each test point; h for one output.
    cross : their cross leverages with training rows.
    single : Query or None
        Where outputs are independent, V = h I and C = c I: what there is to know about one of them.
    """

    leverage: Tensor
    cross: Cross
    single: Query | None = None

    @property
    def of_one(self) -> Query | None:
        """The query of a single output, where that is all there is to know."""
        return self if self.leverage.shape[1] == 1 else self.single


def cross_from(features: FeatureRows, solved: Tensor) -> Cross:
    """Cross leverages phi_i (H^-1 phi^T) with H^-1 phi^T at hand, (m, O, D) in any layout."""
    O, D = solved.shape[1:]
    size = max(1, _STEP // (8 * D)) if solved.device.type == "cpu" else 2**20
    room = solved.new_empty(0, D)  # for rows in float64: fresh memory would take longer than the products

    def cross(rows: RowIndex, points: RowIndex = EVERY) -> Tensor:
        nonlocal room
        P = features.block(rows).flatten(0, 1)  # (n O, D)
        some = solved[points].flatten(0, 1)  # (m' O, D)
        found = some.new_empty(len(some), len(P))
        if len(room) < min(size, len(P)):
            room = solved.new_empty(min(size, len(P)), D)
        for start in range(0, len(P), size):
            part = P[start : start + size]
            part = part if part.dtype == torch.float64 else room[: len(part)].copy_(part)
            torch.mm(some, part.T, out=found[:, start : start + size])
        return found.view(-1, O, len(P) // O, O).permute(0, 2, 3, 1)

    return cross


class Curvature(Protocol):
    """H = sum_i phi_i phi_i^T + diag(l2) over the N training rows, in float64.

    Attributes
    ----------
    name : what it is, in words.
    stands_alone : whether `leverage` and `solve` need no training row.
    selective : whether cross leverages with a few rows take a few rows' work; else a query knows all of them.
    independent : whether V = h I and C = c I for several outputs.
    """

    name: str
    stands_alone: bool
    selective: bool
    independent: bool

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

        H Delta = phi^T e - diag(l2) theta. Without `exactly`, the size of the change is all that is wanted, and a step
        that takes another pass is left empty.
        """

    def state(self) -> dict[str, Tensor]:
        """The tensors from which the structure can be restored without another fit."""


class WhiteningCurvature(Curvature, Protocol):
    """A curvature that knows a root of H, and stands alone."""

    def whiten(self, phi: Tensor) -> Tensor:
        """Rows psi with psi psi^T = phi H^-1 phi^T, for phi (m, O, D): (m, O, D)."""


class NotPositiveDefiniteError(ValueError):
    """H cannot be factorised: the message says which l2 or which rows are to blame."""
