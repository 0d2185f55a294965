"""Nystrom approximation of a positive semidefinite matrix S that is known by its products with blocks of vectors.

    S_k = (S Q) (Q^T S Q)^+ (S Q)^T,   0 <= S_k <= S

is the best that S Q (D x k) tells of S (Frangella, Tropp and Udell, 2023). Q comes from subspace iteration on random
vectors of a fixed seed: it depends on S alone, not on the order in which its parts were summed. Q^T S Q is inverted
where its eigenvalues are more than rounding; nothing is added to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# Of subspace iteration on new vectors, one product with S each.
ROUNDS = 1

Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class LowRank:
    """U diag(lambda) U^T.

    Attributes
    ----------
    vectors : Tensor (D, k)
        U, orthonormal columns.
    eigenvalues : Tensor (k,)
        lambda, positive, the largest first.
    """

    vectors: Tensor
    eigenvalues: Tensor

    @classmethod
    def of_factor(cls, B: Tensor) -> LowRank:
        """B B^T, for B (D, k)."""
        U, R = torch.linalg.qr(B)
        return cls._turned(U, R @ R.T)

    @classmethod
    def of_products(cls, S: Product, Q: Tensor) -> LowRank:
        """The Nystrom approximation of S by orthonormal Q (D, k)."""
        Y = S(Q)
        kept, W = _eigh(Q.T @ Y)
        del Q  # each is as large as the result
        U, R = torch.linalg.qr(Y)
        del Y
        A = R @ (W * kept.rsqrt())  # S_k = U A A^T U^T
        return cls._turned(U, A @ A.T)

    @classmethod
    def _turned(cls, U: Tensor, M: Tensor) -> LowRank:
        """U M U^T."""
        eigenvalues, W = _eigh(M)
        return cls((U @ W.flip(1)).contiguous(), eigenvalues.flip(0))  # row-major before and after saving: same bits

    @property
    def factor(self) -> Tensor:
        """B = U diag(lambda)^(1/2), (D, k)."""
        return self.vectors * self.eigenvalues.sqrt()


def basis(S: Product, known: Tensor, rank: int) -> Tensor:
    """Orthonormal Q (D, rank), nearly invariant under S: the vectors `known` (D, j), and new ones outside of them."""
    size, j = known.shape
    if rank >= size:
        return torch.eye(size, dtype=torch.float64, device=known.device)
    if rank <= j:
        return known[:, :rank]
    generator = torch.Generator().manual_seed(j)
    Z = torch.randn(size, rank - j, generator=generator, dtype=torch.float64).to(known.device)
    for _ in range(ROUNDS):
        Z = _outside(known, S(_outside(known, Z)))
    return torch.cat([known, Z], 1)


def _outside(known: Tensor, Z: Tensor) -> Tensor:
    """An orthonormal basis of the span of Z (D, m), less what lies in that of `known`."""
    for _ in range(2 if known.shape[1] else 1):  # once leaves rounding of what was taken away
        Z = torch.linalg.qr(Z - known @ (known.T @ Z))[0]
    return Z


def _eigh(M: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues of a positive semidefinite matrix that are more than rounding, the smallest first, and vectors."""
    eigenvalues, W = torch.linalg.eigh((M + M.T) / 2)
    kept = eigenvalues > len(M) * torch.finfo(M.dtype).eps * eigenvalues[-1:]
    return eigenvalues[kept], W[:, kept]
