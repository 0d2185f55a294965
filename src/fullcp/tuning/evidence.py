"""The Laplace log marginal likelihood with Gaussian noise, as a function of prior precisions and noise.

With S = sum_i phi_i phi_i^T, n = N O observations, noise variance v and one prior precision d_g for each group g of D_g
parameters,

    log p(y) = -n/2 log(2 pi v) - |e|^2 / (2 v) + 1/2 sum_g (D_g log d_g - d_g |theta_g|^2) - 1/2 log det A
    A        = S / v + diag(d)

and its gradient in log d_g and log v needs only the effective number of parameters of each group,
gamma_g = D_g - d_g tr_g(A^-1):

    d / d log d_g = 1/2 (gamma_g - d_g |theta_g|^2)
    d / d log v   = 1/2 (|e|^2 / v - n + sum_g gamma_g)

With one group, a single eigendecomposition serves every evaluation. With several, each takes a Cholesky factorisation
of A or, for D > n, of v I + sum_g K_g / d_g with the kernels K_g = phi_g phi_g^T. In the terms of the predictors
l2 = v d.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log, pi

import torch
from torch import Tensor

from fullcp.features import FeatureRows


@dataclass(frozen=True)
class Value:
    """The log marginal likelihood and its gradient in the logarithms of precisions (G,) and noise variance."""

    value: float
    in_log_precision: Tensor
    in_log_variance: float


class Evidence:
    """The log marginal likelihood of a network on given rows, in float64.

    Parameters
    ----------
    features : gradients of the rows.
    e : Tensor (N, O)
        Residuals y - f.
    structure : "layer" or "scalar"
        One prior precision a parameter tensor, or one for all.
    """

    def __init__(self, features: FeatureRows, e: Tensor, *, structure: str = "layer"):
        parameters = list(features.jacobian.parameters.values())
        sizes = [p.numel() for p in parameters]
        squares = torch.stack([p.detach().double().square().sum() for p in parameters])
        self.observations = e.numel()
        self.squared_error = float(e.square().sum())
        if structure == "scalar":
            sizes, squares = [sum(sizes)], squares.sum(0, keepdim=True)
        self.sizes = torch.tensor(sizes, dtype=torch.float64, device=e.device)  # D_g
        self.squares = squares  # |theta_g|^2
        self._spectrum: Tensor | None = None
        self._gram: Tensor | None = None
        self._kernels: Tensor | None = None
        if features.size <= self.observations:
            S = features.gram(keep=True)  # the curvature will want it too
            if len(sizes) == 1:
                self._spectrum = torch.linalg.eigvalsh(S).clamp(min=0)
            else:
                self._gram = S
                self._splits = sizes
        else:
            K = _kernels(features, sizes)
            if len(sizes) == 1:
                self._spectrum = torch.linalg.eigvalsh(K[0]).clamp(min=0)
            else:
                self._kernels = K

    @property
    def groups(self) -> int:
        """G, the number of precisions."""
        return len(self.sizes)

    def __call__(self, log_precision: Tensor, log_variance: float) -> Value:
        """Value and gradient at log precisions (G,) and the log noise variance."""
        d, v = log_precision.exp(), torch.tensor(log_variance, dtype=torch.float64).exp().item()
        log_det, gamma = self._determinant(d, v)
        n, penalty = self.observations, d * self.squares
        value = -n / 2 * (log(2 * pi) + log_variance) - self.squared_error / (2 * v)
        value += float((self.sizes * log_precision - penalty).sum()) / 2 - log_det / 2
        return Value(value, (gamma - penalty) / 2, (self.squared_error / v - n + float(gamma.sum())) / 2)

    def _determinant(self, d: Tensor, v: float) -> tuple[float, Tensor]:
        """Log det A and the effective numbers of parameters gamma (G,)."""
        if self._spectrum is not None:
            ratio = self._spectrum / (v * d)  # in units of the prior precision
            log_det = float(self.sizes * d.log() + torch.log1p(ratio).sum())
            return log_det, (ratio / (1 + ratio)).sum().reshape(1)
        if self._gram is not None:
            diagonal = torch.repeat_interleave(d, self.sizes.long())
            L = torch.linalg.cholesky((self._gram / v).diagonal_scatter(self._gram.diagonal() / v + diagonal))
            spread = torch.cholesky_inverse(L).diagonal()  # of A^-1
            traces = torch.stack([part.sum() for part in torch.split(spread, self._splits)])
            return 2 * float(L.diagonal().log().sum()), self.sizes - d * traces
        assert self._kernels is not None
        K = torch.einsum("gij,g->ij", self._kernels, 1 / d)
        G = K / v
        G.diagonal().add_(1.0)
        L = torch.linalg.cholesky(G)
        inverse = torch.cholesky_inverse(L)
        gamma = torch.einsum("gij,ij->g", self._kernels, inverse) / (v * d)
        return float((self.sizes * d.log()).sum()) + 2 * float(L.diagonal().log().sum()), gamma


def _kernels(features: FeatureRows, sizes: list[int]) -> Tensor:
    """K_g of each group, (G, n, n)."""
    O, n = features.outputs, features.count * features.outputs
    K = torch.zeros(len(sizes), n, n, dtype=torch.float64, device=features.x.device)
    features.hold()
    for rows in features.slices():
        P = torch.split(features.block(rows).flatten(0, 1).double(), sizes, dim=1)
        for others, phi in features.chunks("marginal likelihood"):
            Q = torch.split(phi.flatten(0, 1).double(), sizes, dim=1)
            for g, (left, right) in enumerate(zip(P, Q, strict=True)):
                K[g, rows.start * O : rows.stop * O, others.start * O : others.stop * O] = left @ right.T
    return K
