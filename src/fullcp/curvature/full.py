"""The exact Gauss-Newton matrix, in the form that is smaller: primal (D x D) or dual (N O x N O).

See docs/theory.md, "Primal and dual". Rows of phi below are (example, output) pairs, n = N O of them.
All algebra is float64.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from fullcp.curvature.base import Curvature, NotPositiveDefiniteError, Query
from fullcp.curvature.penalty import expand_l2
from fullcp.features import FeatureRows
from fullcp.progress import track

COPIES = {"primal": 1, "dual": 3}  # factorised in its own memory; the dual form inverts the factor as well


def fit_full(features: FeatureRows, l2: object, *, cross: bool = True, form: str | None = None) -> Curvature:
    """Factorise H = sum_i phi_i phi_i^T + diag(l2) over the rows of `features`.

    Parameters
    ----------
    features : gradients of the training rows.
    l2 : the ridge penalty, see `fullcp.curvature.penalty`.
    cross : bool
        Whether training and cross leverages will be asked for, and so the rows again.
    form : "primal", "dual" or None
        None takes primal for D <= N O, where it is the cheaper and the more exact one, and where l2 has a zero.
    """
    return factorise(features, expand_l2(l2, features.jacobian.parameters, features.x.device), cross=cross, form=form)


def factorise(features: FeatureRows, diagonal: Tensor, *, cross: bool = True, form: str | None = None) -> Curvature:
    """The same for a penalty (D,) that is already spread over the columns of phi."""
    if form is None:
        form = form_for(features.count * features.outputs, features.size)
        form = "primal" if bool((diagonal == 0).any()) else form
    size = features.size if form == "primal" else features.count * features.outputs
    _check_memory(form, size, features.x.device)
    if cross and form == "primal":
        features.hold()
    if form == "primal":
        return PrimalCurvature(features, diagonal)
    if (diagonal == 0).any():
        raise ValueError(
            f"l2 must be positive everywhere in the dual form, entry {int((diagonal == 0).nonzero()[0])} is 0"
        )
    return DualCurvature(features, diagonal)


def form_for(rows: int, size: int) -> str:
    """The smaller form for n rows of D parameters, and of equal ones the more exact."""
    return "primal" if size <= rows else "dual"


def restore_full(features: FeatureRows, state: dict[str, Tensor]) -> Curvature:
    """The structure whose `state()` was saved, over the same rows."""
    if "primal_factor" in state:
        features.hold()
        return PrimalCurvature(features, state["l2"], factor=state["primal_factor"])
    return DualCurvature(features, state["l2"], factor=state["dual_factor"])


class PrimalCurvature:
    """H as a D x D Cholesky factor L: right for D <= N O."""

    name = "full, primal"
    stands_alone = True

    def __init__(self, features: FeatureRows, diagonal: Tensor, *, factor: Tensor | None = None):
        self.features = features
        self.diagonal = diagonal
        if factor is None:
            H = features.gram()
            H.diagonal().add_(diagonal)
            factor = _cholesky(H, self._blame)
        self.factor = factor  # L, (D, D)

    def slack(self) -> Tensor:
        """I - V_i, (N, O, O)."""
        O = self.features.outputs
        slack = torch.eye(O, dtype=torch.float64, device=self.factor.device).repeat(self.features.count, 1, 1)
        for rows, phi in self.features.chunks("leverages"):
            slack[rows] -= self.leverage(phi)
        return slack

    def leverage(self, phi: Tensor) -> Tensor:
        """V of test points (m, O, D): (m, O, O)."""
        whitened = self._whiten(phi)
        if phi.shape[1] == 1:
            return whitened.square_().sum(0).view(-1, 1, 1)
        return _gram_blocks(whitened, phi.shape[1])

    def query(self, phi: Tensor) -> Query:
        """Leverages and cross leverages of test points (m, O, D)."""
        m, O, _ = phi.shape
        columns = self._whiten(phi)  # L^-1 phi^T, (D, m O)
        V = _gram_blocks(columns, O)
        solved = torch.linalg.solve_triangular(self.factor.T, columns, upper=True, out=columns)  # H^-1 phi^T

        def cross(rows: slice) -> Tensor:
            P = self.features.block(rows).flatten(0, 1).double()  # (n O, D)
            return (solved.T @ P.T).view(m, O, -1, O).permute(0, 2, 3, 1)

        return Query(V, cross)

    def solve(self, vectors: Tensor) -> Tensor:
        """H^-1 times vectors (D,) or (D, m)."""
        columns = vectors.reshape(self.features.size, -1)
        return torch.cholesky_solve(columns, self.factor).view_as(vectors)

    def refine(self, e: Tensor, weights: Tensor, *, exactly: bool = True) -> tuple[Tensor, Tensor]:
        """The step to the ridge solution and the residuals there.

        A second solve, from the gradient at the first solution, takes the rounding of the first one away: far from
        the minimum the step is large, and the residuals that it leaves may be small.
        """
        step, refined = torch.zeros_like(weights), e.clone()
        for _ in range(2 if exactly else 1):
            descent = -self.diagonal * (weights + step)
            for rows, phi in self.features.chunks("refinement"):
                descent += torch.einsum("nod,no->d", phi.double(), refined[rows])
            step += self.solve(descent)
            for rows, phi in self.features.chunks("refinement"):
                refined[rows] = e[rows] - phi.double() @ step
        return step, refined

    def state(self) -> dict[str, Tensor]:
        """The factor and the penalty."""
        return {"primal_factor": self.factor, "l2": self.diagonal}

    def _whiten(self, phi: Tensor) -> Tensor:
        """L^-1 phi^T of rows phi (m, O, D), in memory of its own: (D, m O)."""
        columns = phi.flatten(0, 1).to(torch.float64, copy=True).T
        return torch.linalg.solve_triangular(self.factor, columns, upper=False, out=columns)

    def _blame(self, column: int) -> str:
        name = self.features.jacobian.locate(column)
        return (
            f"H = sum of phi phi^T + diag(l2) is singular in float64 at parameter {name}: l2 = "
            f"{self.diagonal[column].item():.3g} there does not hold what the rows leave undetermined; raise it"
        )


class DualCurvature:
    """H through G = I + K, K = phi diag(1/l2) phi^T, an n x n Cholesky factor: right for D > N O.

    With phi' = phi / sqrt(l2): a = G^-1 phi'_train phi'^T are the cross leverages, and r = phi' - phi'_train^T a is
    (I + phi'_train^T phi'_train)^-1 phi', so that h = phi'^T r = r^T r + a^T a, a sum of squares: nothing cancels.
    """

    name = "full, dual"
    stands_alone = False

    def __init__(self, features: FeatureRows, diagonal: Tensor, *, factor: Tensor | None = None):
        self.features = features
        self.diagonal = diagonal
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
        if factor is None:
            factor = _cholesky(self._gram(), self._blame, least=1e3)
        self.factor = factor  # L of G, (n, n)

    def slack(self) -> Tensor:
        """I - V_i = the diagonal blocks of G^-1, (N, O, O)."""
        N, O = self.features.count, self.features.outputs
        blocks = torch.cholesky_inverse(self.factor).view(N, O, N, O)
        return blocks.diagonal(dim1=0, dim2=2).permute(2, 0, 1).contiguous()

    def leverage(self, phi: Tensor) -> Tensor:
        """V of test points (m, O, D): (m, O, O)."""
        return self.query(phi).leverage

    def query(self, phi: Tensor) -> Query:
        """Leverages and cross leverages of test points (m, O, D)."""
        m, O, _ = phi.shape
        a, r = self._split(self._scaled(phi).T)  # (n, m O), (D, m O)
        C = a.view(-1, O, m, O).permute(2, 0, 1, 3)  # (m, N, O, O)
        return Query(_gram_blocks(a, O) + _gram_blocks(r, O), lambda rows: C[:, rows])

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

    def _blame(self, row: int) -> str:
        example = row // self.features.outputs
        smallest = (1 / self.root**2).min().item()
        return (
            f"I + phi diag(1/l2) phi^T is singular in float64 at row {example} of X: the smallest l2, {smallest:.3g}, "
            f"is too small for gradients of this size (or the row repeats earlier ones); raise l2"
        )


def _gram_blocks(columns: Tensor, outputs: int) -> Tensor:
    """The O x O blocks of columns^T columns, (m, O, O), for columns (d, m O)."""
    blocks = columns.view(len(columns), -1, outputs)
    if outputs == 1:
        return blocks.square().sum(0).unsqueeze(2)
    return torch.einsum("dmo,dmp->mop", blocks, blocks)


def _cholesky(H: Tensor, blame: Callable[[int], str], *, least: float = 1.0) -> Tensor:
    """Lower factor of H, of which the lower triangle counts, in H's own memory; no jitter is ever added.

    A pivot that keeps less than `least` D eps of its diagonal entry is rounding noise: the factor would be one of
    chance. The dual form asks for more, because it reads slacks off the inverse.
    """
    entries = H.diagonal().clone()
    U, info = H.T, torch.empty((), dtype=torch.int32, device=H.device)
    torch.linalg.cholesky_ex(U, upper=True, out=(U, info))  # U = L^T by columns, as LAPACK counts, is L by rows
    if info.item() > 0:
        raise NotPositiveDefiniteError(blame(int(info.item()) - 1))
    kept = H.diagonal().square() / entries
    worst = int(kept.argmin())
    if not kept[worst] > least * len(H) * torch.finfo(H.dtype).eps:
        raise NotPositiveDefiniteError(blame(worst))
    return H


def _check_memory(form: str, size: int, device: torch.device) -> None:
    """Refuse a factor that the machine cannot hold, before it starts to swap."""
    needed = COPIES[form] * 8 * size**2
    if device.type == "cuda":
        held = torch.cuda.mem_get_info(device)[1]
    elif hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        held = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        return
    if needed > held:
        raise MemoryError(
            f"curvature='full' needs {needed / 1e9:.1f} GB for a {size} x {size} matrix, {device} has "
            f"{held / 1e9:.1f} GB: curvature='kfac', 'last_layer' and 'low_rank' take far less, and so does the exact "
            "matrix of fewer parameters (see `parameters`)"
        )
