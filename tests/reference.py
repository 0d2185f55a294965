"""The slow way: explicit refits, dense float64 algebra, grids of labels. The tests' idea of the truth."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

Array = NDArray[np.float64]


def dense_jacobian(model: nn.Module, X: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs (n, O) and gradients (n, O, D) in float64, by plain autograd on one row at a time."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    fs, phis = [], []
    for row in X:
        f = model(row.unsqueeze(0)).reshape(-1)
        fs.append(f.detach().double())
        rows = [torch.autograd.grad(fo, parameters, retain_graph=True, materialize_grads=True) for fo in f]
        phis.append(torch.stack([torch.cat([g.flatten() for g in row]) for row in rows]).double())
    return torch.stack(fs), torch.stack(phis)


def dense_kfac(model: nn.Sequential, X: Tensor) -> dict[str, Tensor]:
    """The Kronecker-factored blocks of S of a chain of layers, by loops over rows, outputs and positions."""
    A, B, G = {}, {}, {}
    positions = {}
    for row in X:
        x, seen = row.unsqueeze(0), []
        for index, layer in enumerate(model):
            z = layer(x)
            if any(True for _ in layer.parameters()):
                seen.append((str(index), layer, x.detach(), z))
            x = z
        for index, layer, inside, z in seen:
            for a in positions_of(layer, inside):
                A[index] = A.get(index, 0) + torch.outer(a, a)
            positions[index] = positions.get(index, 0) + len(positions_of(layer, inside))
            for fo in x[0]:
                (g,) = torch.autograd.grad(fo, z, retain_graph=True)
                each = g[0].reshape(g.shape[1], -1).T if g.ndim == 4 else g.reshape(-1, g.shape[-1])  # (T, out)
                B[index] = B.get(index, 0) + sum(torch.outer(gt, gt) for gt in each)
                G[index] = G.get(index, 0) + torch.outer(each.sum(0), each.sum(0))
    blocks = {}
    for name, _ in model.named_parameters():
        index, kind = name.split(".")
        blocks[name] = G[index] if kind == "bias" else torch.kron(B[index] / positions[index], A[index])
    return blocks


def dense_low_rank(S: Tensor, rank: int) -> Tensor:
    """The Nystrom formula on S (D, D), by subspace iteration from the random vectors that the library draws."""
    if rank >= len(S):
        return S
    Z = torch.randn(len(S), rank, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    Q = torch.linalg.qr(S @ torch.linalg.qr(Z)[0])[0]
    return S @ Q @ torch.linalg.pinv(Q.T @ S @ Q, hermitian=True) @ Q.T @ S


def positions_of(layer: nn.Module, x: Tensor) -> list[Tensor]:
    """What a layer sees of one row at each position."""
    if isinstance(layer, nn.Linear):
        return list(x.reshape(-1, x.shape[-1]))
    (kh, kw), (sh, sw), (dh, dw), (ph, pw) = layer.kernel_size, layer.stride, layer.dilation, layer.padding
    x = nn.functional.pad(x, (pw, pw, ph, ph))[0]
    found = []
    for i in range(0, x.shape[1] - dh * (kh - 1), sh):
        for j in range(0, x.shape[2] - dw * (kw - 1), sw):
            found.append(x[:, i : i + dh * (kh - 1) + 1 : dh, j : j + dw * (kw - 1) + 1 : dw].flatten())
    return found


def ridge(X: Array, Y: Array, l2: Array) -> Array:
    """Ridge solutions for each column of Y, by QR of the augmented least squares problem."""
    A = np.vstack([X, np.diag(np.sqrt(l2))])
    B = np.vstack([Y, np.zeros((len(l2), Y.shape[1]))])
    return np.linalg.lstsq(A, B, rcond=None)[0]


def ridge_gaps(X: Array, l2: Array) -> Array:
    """1 - leverage of each row: the squared norm that the row's unit vector keeps outside of the column space."""
    A = np.vstack([X, np.diag(np.sqrt(l2))])
    Q, _ = np.linalg.qr(A, mode="complete")
    return np.square(Q[: len(X), A.shape[1] :]).sum(1)


@dataclass
class RefitScores:
    """Signed scores of N training rows and the new one after a refit on all N + 1, for each of K labels."""

    train: Array  # (N, K)
    new: Array  # (K,)

    def counts(self, residuals: str, slope_whole: NDArray[np.bool_], tolerance: float = 1e-9):
        """How many training rows score at least as high as the new one: (surely, possibly), upper and lower tail."""
        train, new = self.train, self.new
        if residuals == "absolute":
            train, new = np.abs(train), np.abs(new)
        scale = tolerance * (np.abs(train) + np.abs(new)[None] + 1e-9 * np.abs(self.train).max())
        pairs = [(train - new[None], scale)]
        if residuals == "signed":
            pairs.append((new[None] - train, scale))
        out = []
        for gap, room in pairs:
            surely, possibly = gap > room, gap > -room
            if residuals == "signed":
                surely, possibly = surely | slope_whole[:, None], possibly | slope_whole[:, None]
            out.append((surely.sum(0), possibly.sum(0)))
        return out


def refit_scores(X: Array, y: Array, x_new: Array, labels: Array, l2: Array, score: str, *, delete: bool = False):
    """Refit the ridge problem on the training rows and (x_new, label), for every label.

    With `delete`, deleted scores come from refits that really leave out each row in turn.
    """
    X1 = np.vstack([X, x_new])
    Y1 = np.vstack([np.repeat(y[:, None], len(labels), 1), labels[None]])
    if score == "deleted" and delete:
        rho = np.empty_like(Y1)
        for i in range(len(X1)):
            kept = np.arange(len(X1)) != i
            rho[i] = Y1[i] - X1[i] @ ridge(X1[kept], Y1[kept], l2)
        return RefitScores(rho[:-1], rho[-1])
    rho = Y1 - X1 @ ridge(X1, Y1, l2)
    gaps = ridge_gaps(X1, l2)[:, None]
    rho = rho / {"standard": 1.0, "deleted": gaps, "studentized": np.sqrt(gaps)}[score]
    return RefitScores(rho[:-1], rho[-1])


def whole_lines(X: Array, y: Array, x_new: Array, l2: Array, score: str) -> NDArray[np.bool_]:
    """Training rows whose signed score grows at least as fast with the label as the new one's."""
    scores = refit_scores(X, y, x_new, np.array([0.0, 1.0]), l2, score)
    slope = (scores.new[1] - scores.new[0]) - (scores.train[:, 1] - scores.train[:, 0])
    return slope <= 0


def need(level: float, N: int, residuals: str) -> int:
    """How many training rows must score at least as high for a label to stay in the set."""
    level = Fraction(str(level))
    if residuals == "absolute":
        return N + 1 - ceil(level * (N + 1))
    return floor((N + 1) * (1 - level) / 2)


@dataclass
class DenseGaussNewton:
    """ACP-GN for one output in the paper's own coordinates: residuals |a_i + b_i y|, by dense inverses."""

    a: Array  # (N + 1,)
    b: Array  # (N + 1,)

    @classmethod
    def at(cls, phi: Array, e: Array, phi_new: Array, f_new: float, l2: Array, score: str):
        """Coefficients for one test point; the last entry is the new one."""
        H_inv = np.linalg.inv(phi.T @ phi + np.diag(l2))
        h_cross, h_new = phi @ H_inv @ phi_new, phi_new @ H_inv @ phi_new
        a = np.append(e + h_cross / (1 + h_new) * f_new, -f_new / (1 + h_new))
        b = np.append(-h_cross / (1 + h_new), 1 / (1 + h_new))
        both = np.vstack([phi, phi_new])
        H_bar = np.linalg.inv(both.T @ both + np.diag(l2))
        gap = 1 - np.einsum("nd,de,ne->n", both, H_bar, both)
        u = {"standard": np.ones_like(gap), "deleted": gap, "studentized": np.sqrt(gap)}[score]
        return cls(a / u, b / u)

    def signed_interval(self, level: float) -> tuple[float, float]:
        """Algorithm 2 of the paper."""
        N = len(self.a) - 1
        slope = self.b[-1] - self.b[:-1]
        with np.errstate(divide="ignore"):
            r = (self.a[:-1] - self.a[-1]) / slope
        lower = np.sort(np.where(slope > 0, r, -np.inf))
        upper = np.sort(np.where(slope > 0, r, np.inf))
        k = need(level, N, "signed")
        return (lower[k - 1] if k else -np.inf), (upper[N - k] if k else np.inf)

    def absolute_set(self, level: float) -> list[tuple[float, float]]:
        """The set by looking at every changepoint and every midpoint between neighbours."""
        N = len(self.a) - 1
        least = need(level, N, "absolute")
        if least == 0:
            return [(-np.inf, np.inf)]
        points = []
        for a, b in zip(self.a[:-1], self.b[:-1], strict=True):
            for sign in (1, -1):
                if self.b[-1] != sign * b:
                    points.append((sign * a - self.a[-1]) / (self.b[-1] - sign * b))
        points = np.unique(points)
        spread = max(1.0, float(np.ptp(points)))
        probes = np.concatenate([[points[0] - spread], (points[1:] + points[:-1]) / 2, [points[-1] + spread]])
        inside = [
            (np.abs(self.a[:-1] + self.b[:-1] * y) >= abs(self.a[-1] + self.b[-1] * y)).sum() >= least for y in probes
        ]
        edges = np.concatenate([[-np.inf], points, [np.inf]])
        pieces: list[tuple[float, float]] = []
        for j, member in enumerate(inside):
            if member and pieces and pieces[-1][1] == edges[j]:
                pieces[-1] = (pieces[-1][0], edges[j + 1])
            elif member:
                pieces.append((edges[j], edges[j + 1]))
        return pieces


def log_marginal_likelihood(phi: Tensor, e: Tensor, theta: Tensor, d: Tensor, v: Tensor) -> Tensor:
    """Laplace's formula with slogdet, for gradients phi (n, D), residuals e (n,), weights theta, precisions d (D,)."""
    A = phi.T @ phi / v + torch.diag(d)
    fit = len(e) * torch.log(2 * torch.pi * v) + e.square().sum() / v
    return (d.log().sum() - (d * theta.square()).sum() - fit - torch.linalg.slogdet(A)[1]) / 2
