"""Curvature with known eigenvectors: H = Q (diag(lambda) + diag(l2)) Q^T, a block a parameter tensor.

S = Q diag(lambda) Q^T is known before l2 is, and any l2 of one value a tensor leaves Q as it is. Q is never formed: in
each block it is the identity, dense and small, or a Kronecker product of two small factors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fullcp.curvature.base import NotPositiveDefiniteError, Query, cross_from
from fullcp.curvature.penalty import expand_l2
from fullcp.curvature.ridge import ROUGH_STEPS, ridge_step
from fullcp.features import FeatureRows


@dataclass(frozen=True)
class Block:
    """S restricted to one parameter tensor of d entries, seen as a matrix (p, q): Q = left (x) right.

    Attributes
    ----------
    eigenvalues : Tensor (p, q)
    left, right : Tensor (p, p), (q, q) or None
        Orthogonal; None is the identity.
    """

    eigenvalues: Tensor
    left: Tensor | None = None
    right: Tensor | None = None

    @classmethod
    def of(cls, S: Tensor) -> Block:
        """The block of a dense matrix S (d, d), positive semidefinite."""
        eigenvalues, Q = _eigh(S)
        return cls(eigenvalues.unsqueeze(1), Q)

    @classmethod
    def kronecker(cls, B: Tensor, A: Tensor) -> Block:
        """The block B (x) A of two matrices (p, p) and (q, q), positive semidefinite."""
        (b, left), (a, right) = _eigh(B), _eigh(A)
        return cls(torch.outer(b, a), left, right)

    @property
    def is_diagonal(self) -> bool:
        """Whether Q is the identity."""
        return self.left is None and self.right is None

    def rotate(self, v: Tensor) -> Tensor:
        """v Q for rows v (..., d)."""
        V = v.reshape(*v.shape[:-1], *self.eigenvalues.shape)
        V = V if self.left is None else self.left.T @ V
        V = V if self.right is None else V @ self.right
        return V.flatten(-2)

    def turn_back(self, v: Tensor) -> Tensor:
        """v Q^T for rows v (..., d)."""
        V = v.reshape(*v.shape[:-1], *self.eigenvalues.shape)
        V = V if self.left is None else self.left @ V
        V = V if self.right is None else V @ self.right.T
        return V.flatten(-2)


class EigenCurvature:
    """H = Q diag(lambda + l2) Q^T, from the blocks of S = Q diag(lambda) Q^T.

    Parameters
    ----------
    features : gradients of the training rows.
    blocks : one a parameter tensor, in their order.
    diagonal : Tensor (D,)
        The penalty; within a block that is not diagonal, one value.
    name : what it is, in words.
    """

    rough_steps = ROUGH_STEPS
    stands_alone = True
    selective = True
    independent = False

    def __init__(self, features: FeatureRows, blocks: list[Block], diagonal: Tensor, *, name: str):
        self.features, self.blocks, self.diagonal, self.name = features, blocks, diagonal, name
        self.sizes = [block.eigenvalues.numel() for block in blocks]
        H = torch.cat([block.eigenvalues.flatten() for block in blocks]) + diagonal
        self._check(H)
        self.root = H.rsqrt()  # 1 / sqrt(lambda + l2), (D,)

    def slack(self) -> Tensor:
        """I - V_i, (N, O, O): not positive where the approximation is poor."""
        O = self.features.outputs
        slack = torch.eye(O, dtype=torch.float64, device=self.root.device).repeat(self.features.count, 1, 1)
        for rows, phi in self.features.chunks("leverages"):
            slack[rows] -= self.leverage(phi)
        return slack

    def leverage(self, phi: Tensor) -> Tensor:
        """V of test points (m, O, D): (m, O, O)."""
        whitened = self.whiten(phi)
        return whitened @ whitened.mT

    def whiten(self, phi: Tensor) -> Tensor:
        """Rows psi with psi psi^T = phi H^-1 phi^T, for phi (m, O, D): (m, O, D)."""
        return self._whiten(phi.double())

    def query(self, phi: Tensor) -> Query:
        """Leverages and cross leverages of test points (m, O, D)."""
        whitened = self.whiten(phi)
        solved = self._whiten_back(whitened)  # H^-1 phi^T, (m, O, D)
        return Query(whitened @ whitened.mT, cross_from(self.features, solved))

    def solve(self, vectors: Tensor) -> Tensor:
        """H^-1 times vectors (D,) or (D, m)."""
        columns = vectors.reshape(self.features.size, -1)
        return self._whiten_back(self._whiten(columns.T)).T.reshape(vectors.shape)

    def refine(self, e: Tensor, weights: Tensor, *, exactly: bool = True) -> tuple[Tensor, Tensor]:
        """The step to the ridge solution of the linearised network itself, not of this approximation to it.

        By conjugate gradients with H as the preconditioner; see `fullcp.curvature.ridge`.
        """
        return ridge_step(
            self.features, self.diagonal, self.solve, e, weights, exactly=exactly, rough_steps=self.rough_steps
        )

    def state(self) -> dict[str, Tensor]:
        """Eigenvalues, eigenvectors and the penalty."""
        sides = {f"eigen.{k}.{side}": getattr(b, side) for k, b in enumerate(self.blocks) for side in ("left", "right")}
        eigenvalues = torch.cat([block.eigenvalues.flatten() for block in self.blocks])
        kept = {name: factor for name, factor in sides.items() if factor is not None}
        return {"eigenvalues": eigenvalues, **kept, "l2": self.diagonal}

    def _whiten(self, v: Tensor) -> Tensor:
        """v Q (lambda + l2)^-1/2 for rows v (..., D)."""
        parts = torch.split(v, self.sizes, -1)
        return self.root * torch.cat([b.rotate(u) for b, u in zip(self.blocks, parts, strict=True)], -1)

    def _whiten_back(self, v: Tensor) -> Tensor:
        """v (lambda + l2)^-1/2 Q^T for rows v (..., D)."""
        parts = torch.split(self.root * v, self.sizes, -1)
        return torch.cat([b.turn_back(u) for b, u in zip(self.blocks, parts, strict=True)], -1)

    def _check(self, H: Tensor) -> None:
        """Refuse an l2 that varies where the eigenvectors need one value, or that leaves H singular."""
        parts = torch.split(H, self.sizes), torch.split(self.diagonal, self.sizes)
        for name, block, values, l2 in zip(self.features.jacobian.parameters, self.blocks, *parts, strict=True):
            if not block.is_diagonal and l2.min() < l2.max():
                raise ValueError(
                    f"l2 varies within {name}, from {l2.min().item():.3g} to {l2.max().item():.3g}: curvature="
                    f"'{self.name}' needs one value a parameter tensor; use curvature='full' or 'diagonal'"
                )
            # Eigenvalues are known to rounding of the largest; those of a diagonal matrix as they are.
            floor = (
                0.0 if block.is_diagonal else len(values) * torch.finfo(H.dtype).eps * float(block.eigenvalues.max())
            )
            if not float(values.min()) > floor:
                raise NotPositiveDefiniteError(
                    f"H is singular in float64 in parameter {name}: l2 = {l2[values.argmin()].item():.3g} there does "
                    "not hold what the rows leave undetermined; raise it"
                )


def expand_over(features: FeatureRows, l2: object) -> Tensor:
    """The penalty of the parameters of `features`, (D,)."""
    return expand_l2(l2, features.jacobian.parameters, features.x.device)


def restore_blocks(features: FeatureRows, state: dict[str, Tensor]) -> list[Block]:
    """The blocks of the structure whose `state()` was saved."""
    parameters = features.jacobian.parameters
    blocks = []
    for k, values in enumerate(torch.split(state["eigenvalues"], [p.numel() for p in parameters.values()])):
        left, right = state.get(f"eigen.{k}.left"), state.get(f"eigen.{k}.right")
        rows = 1 if left is None else len(left)
        blocks.append(Block(values.view(rows, -1), left, right))
    return blocks


def _eigh(S: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and vectors of a positive semidefinite matrix; what rounding took below zero is zero."""
    eigenvalues, Q = torch.linalg.eigh(S)
    return eigenvalues.clamp(min=0), Q.contiguous()  # row-major before and after saving: the same bits
