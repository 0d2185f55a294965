"""The exact Gauss-Newton matrix in its dual form, for networks whose gradients no memory holds.

G = I + K as in `dual`, with K from what layers see (`fullcp.features.kernels`) and never from phi. Test points come as
they are, and k, their kernel with the training rows, is computed the same way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fullcp.curvature.base import EVERY, NotPositiveDefiniteError, Query
from fullcp.curvature.cholesky import LEAST_IN_DUAL, gram_blocks
from fullcp.curvature.dual import DualForm
from fullcp.features import FeatureRows, KernelRows


class KernelCurvature(DualForm):
    """H through G = I + K: c = G^-1 k and h = k(x, x) - k^T G^-1 k.

    The difference cancels where rows are many and l2 is small; all numbers are float64, those of the network included.

    Parameters
    ----------
    features : the training rows, of whose gradients none is asked for.
    diagonal : Tensor (D,)
        The penalty.
    rows : their kernels.
    factor : L of G; None computes it.
    """

    name = "full, kernels"

    def __init__(self, features: FeatureRows, diagonal: Tensor, rows: KernelRows, *, factor: Tensor | None = None):
        self.rows = rows
        self.scales = rows.scales(diagonal)
        features.forgo()
        super().__init__(features, diagonal, factor)

    def leverage(self, phi: Tensor) -> Tensor:
        """V of test points, given as they are (m, ...): (m, O, O)."""
        return self._split(phi)[0]

    def query(self, phi: Tensor) -> Query:
        """Leverages and cross leverages of test points, given as they are (m, ...)."""
        m, O = len(phi), self.features.outputs
        V, whitened = self._split(phi)
        a = torch.linalg.solve_triangular(self.factor.T, whitened, upper=True)  # G^-1 k, (n, m O)
        C = a.view(-1, O, m, O).permute(2, 0, 1, 3)  # (m, N, O, O)
        return Query(V, lambda rows, points=EVERY: C[points][:, rows])

    def solve(self, vectors: Tensor) -> Tensor:
        """H^-1 times vectors (D,) or (D, m): (v - phi^T G^-1 phi (v / l2)) / l2."""
        columns = vectors.reshape(self.features.size, -1)
        l2 = self.diagonal.unsqueeze(1)
        a = torch.cholesky_solve(self.rows.push(columns / l2), self.factor)
        return ((columns - self.rows.pull(a)) / l2).view_as(vectors)

    def refine(self, e: Tensor, weights: Tensor, *, exactly: bool = True) -> tuple[Tensor, Tensor]:
        """The step to the ridge solution and the residuals there, see `DualCurvature.refine`.

        Residuals come without the step, which takes another pass over the rows: it is left empty where not wanted.
        """
        targets = e.reshape(-1, 1) + self.rows.push(weights.unsqueeze(1))
        refined = torch.cholesky_solve(targets, self.factor)
        step = self.rows.pull(refined)[:, 0].div_(self.diagonal).sub_(weights) if exactly else weights.new_empty(0)
        return step, refined.view_as(e)

    def change(self, x: Tensor, step: Tensor) -> Tensor:
        """Phi Delta of test points (m, ...), what a step (D,) adds to their predictions: (m, O)."""
        return self.rows.push_points(self.rows.look(x), step.unsqueeze(1)).view(len(x), -1)

    def state(self) -> dict[str, Tensor]:
        """The factor and the penalty."""
        return {"kernel_factor": self.factor, "l2": self.diagonal}

    def _gram(self) -> Tensor:
        """G = I + K, its lower triangle."""
        G = self.rows.kernel(self.scales)
        G.diagonal().add_(1.0)
        return G

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """V (m, O, O) of test points x (m, ...), and L^-1 k (n, m O)."""
        points = self.rows.look(x)
        own, k = self.rows.own(points, self.scales), self.rows.cross(points, self.scales)
        whitened = torch.linalg.solve_triangular(self.factor, k, upper=False)
        V = own - gram_blocks(whitened, self.features.outputs)
        kept = (1 + V.diagonal(dim1=1, dim2=2)) / (1 + own.diagonal(dim1=1, dim2=2))  # the pivots that x would have
        if bool((kept <= LEAST_IN_DUAL * len(self.factor) * torch.finfo(V.dtype).eps).any()):
            raise NotPositiveDefiniteError(
                f"the leverage of a test point is lost to rounding in float64: the smallest l2, "
                f"{self.diagonal.min().item():.3g}, is too small for gradients of its size; raise l2"
            )
        return V, whitened
