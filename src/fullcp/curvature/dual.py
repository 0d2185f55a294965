"""The exact Gauss-Newton matrix in its dual form, n x n: right for more parameters than rows, n = N O.

See docs/theory.md, "Primal and dual". All algebra is float64.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fullcp.curvature.base import EVERY, Query
from fullcp.curvature.cholesky import LEAST_IN_DUAL, cholesky, gram_blocks
from fullcp.features import FeatureRows
from fullcp.progress import track


class DualForm:
    """What the dual forms share: the factor of G = I + K, and what follows from it alone.

    Parameters
    ----------
    features : gradients of the training rows.
    diagonal : Tensor (D,)
        The penalty.
    factor : L of G (n, n); None computes it.
    """

    stands_alone = False
    selective = False
    independent = False

    def __init__(self, features: FeatureRows, diagonal: Tensor, factor: Tensor | None = None):
        self.features = features
        self.diagonal = diagonal
        self.factor = cholesky(self._gram(), self._blame, least=LEAST_IN_DUAL) if factor is None else factor

    def slack(self) -> Tensor:
        """I - V_i = the diagonal blocks of G^-1, (N, O, O)."""
        N, O = self.features.count, self.features.outputs
        blocks = torch.cholesky_inverse(self.factor).view(N, O, N, O)
        return blocks.diagonal(dim1=0, dim2=2).permute(2, 0, 1).contiguous()

    def _gram(self) -> Tensor:
        """G, of which the lower triangle is filled."""
        raise NotImplementedError

    def _blame(self, row: int) -> str:
        example = row // self.features.outputs
        return (
            f"I + phi diag(1/l2) phi^T is singular in float64 at row {example} of X: the smallest l2, "
            f"{self.diagonal.min().item():.3g}, is too small for gradients of this size (or the row repeats earlier "
            "ones); raise l2"
        )


class DualCurvature(DualForm):
    """H through G = I + K, K = phi diag(1/l2) phi^T, an n x n Cholesky factor: right for D > N O.

    With phi' = phi / sqrt(l2): a = G^-1 phi'_train phi'^T are the cross leverages, and r = phi' - phi'_train^T a is
    (I + phi'_train^T phi'_train)^-1 phi', so that h = phi'^T r = r^T r + a^T a, a sum of squares: nothing cancels.
    """

    name = "full, dual"

    def __init__(self, features: FeatureRows, diagonal: Tensor, *, factor: Tensor | None = None):
        self.root = diagonal.rsqrt()  # 1 / sqrt(l2), (D,)
        self._held: Tensor | None = None  # phi' of all rows, (n, D), where it fits: each query passes over it twice
        if 8 * features.count * features.outputs * features.size <= features.memory // 2:
            O = features.outputs
            held = diagonal.new_empty(features.count * O, features.size)
            for rows, phi in features.chunks("gradients"):
                held[rows.start * O : rows.stop * O] = self._scaled(phi)
            self._held = held
            features.release()
        else:
            features.hold()
        super().__init__(features, diagonal, factor)

    def leverage(self, phi: Tensor) -> Tensor:
        """V of test points (m, O, D): (m, O, O)."""
        return self.query(phi).leverage

    def query(self, phi: Tensor) -> Query:
        """Leverages and cross leverages of test points (m, O, D)."""
        m, O, _ = phi.shape
        a, r = self._split(self._scaled(phi).T)  # (n, m O), (D, m O)
        C = a.view(-1, O, m, O).permute(2, 0, 1, 3)  # (m, N, O, O)
        return Query(gram_blocks(a, O) + gram_blocks(r, O), lambda rows, points=EVERY: C[points][:, rows])

    def solve(self, vectors: Tensor) -> Tensor:
        """H^-1 times vectors (D,) or (D, m)."""
        columns = vectors.reshape(self.features.size, -1)
        _, r = self._split(self.root.unsqueeze(1) * columns)
        return (self.root.unsqueeze(1) * r).view_as(vectors)

    def refine(self, e: Tensor, weights: Tensor, *, exactly: bool = True) -> tuple[Tensor, Tensor]:
        """The step to the ridge solution and the residuals there.

        Residuals G^-1 (e + phi theta) and weights diag(1/l2) phi^T times them: no large numbers are subtracted, which
        matters because residuals are of the size of l2 here.
        """
        targets = e.reshape(-1).clone()
        for rows, P in self._blocks("refinement"):
            targets[rows] += P @ (weights / self.root)
        refined = torch.cholesky_solve(targets.unsqueeze(1), self.factor)
        solution = torch.zeros_like(weights)
        for rows, P in self._blocks("refinement"):
            solution += P.T @ refined[rows, 0]
        return self.root * solution - weights, refined.view_as(e)

    def state(self) -> dict[str, Tensor]:
        """The factor and the penalty."""
        return {"dual_factor": self.factor, "l2": self.diagonal}

    def _split(self, columns: Tensor) -> tuple[Tensor, Tensor]:
        """The parts a (n, m) and r (D, m) of columns phi'^T (D, m); see the class."""
        k = columns.new_empty(len(self.factor), columns.shape[1])
        for rows, P in self._blocks("kernel"):
            k[rows] = P @ columns
        a = torch.cholesky_solve(k, self.factor)
        r = columns.clone()
        for rows, P in self._blocks("kernel"):
            r.addmm_(P.T, a[rows], alpha=-1)
        return a, r

    def _blocks(self, description: str) -> Iterator[tuple[slice, Tensor]]:
        """Blocks of the n rows of phi', with their places."""
        if self._held is not None:
            yield slice(0, len(self._held)), self._held
            return
        O = self.features.outputs
        for rows, phi in self.features.chunks(description):
            yield slice(rows.start * O, rows.stop * O), self._scaled(phi)

    def _gram(self) -> Tensor:
        """G = I + K, filled block by block below the diagonal."""
        if self._held is not None:
            G = self._held @ self._held.T
            G.diagonal().add_(1.0)
            return G
        O, D = self.features.outputs, self.features.size
        n = self.features.count * O
        G = torch.zeros(n, n, dtype=torch.float64, device=self.features.x.device)
        chunks = self.features.slices()
        # Each group of chunks is held while the others pass by: the fewer groups, the fewer gradients twice computed.
        size = max(1, self.features.memory // 4 // (8 * O * D * self.features.chunk))
        for first in track(range(0, len(chunks), size), "curvature", -(-len(chunks) // size)):
            group = chunks[first : first + size]
            at = slice(group[0].start * O, group[-1].stop * O)
            P = torch.cat([self._scaled(self.features.block(rows)) for rows in group])
            G[at, at] = P @ P.T
            for others in chunks[:first]:
                G[at, others.start * O : others.stop * O] = P @ self._scaled(self.features.block(others)).T
        G.diagonal().add_(1.0)
        return G

    def _scaled(self, phi: Tensor) -> Tensor:
        """The rows phi' = phi / sqrt(l2), (n O, D)."""
        return phi.flatten(0, 1).double() * self.root
