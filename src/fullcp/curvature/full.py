"""The exact Gauss-Newton matrix, in the form that is smaller: primal (D x D) or dual (N O x N O).

See docs/theory.md, "Primal and dual". Rows of phi below are (example, output) pairs, n = N O of them.
All algebra is float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fullcp.curvature.base import Curvature, Query, cross_from
from fullcp.curvature.cholesky import cholesky, gram_blocks
from fullcp.curvature.dual import DualCurvature
from fullcp.curvature.kernels import KernelCurvature
from fullcp.curvature.penalty import expand_l2
from fullcp.features import FeatureRows, kernel_rows
from fullcp.memory import check_held

COPIES = {"primal": 1, "dual": 3}  # factorised in its own memory; the dual form inverts the factor as well


def fit_full(features: FeatureRows, l2: object, *, cross: bool = True, form: str | None = None) -> Curvature:
    """Factorise H = sum_i phi_i phi_i^T + diag(l2) over the rows of `features`.

    Parameters
    ----------
    features : gradients of the training rows.
    l2 : the ridge penalty, see `fullcp.curvature.penalty`.
    cross : bool
        Whether training and cross leverages will be asked for, and so the rows again.
    form : "primal", "dual", "kernels" or None
        None takes primal for D <= N O, where it is the cheaper and the more exact one, and where l2 has a zero. Else it
        takes dual, and kernels where gradients of all rows exceed the memory budget.
    """
    return factorise(features, expand_l2(l2, features.jacobian.parameters, features.x.device), cross=cross, form=form)


def factorise(features: FeatureRows, diagonal: Tensor, *, cross: bool = True, form: str | None = None) -> Curvature:
    """The same for a penalty (D,) that is already spread over the columns of phi."""
    n = features.count * features.outputs
    if form == "primal" or (form is None and (form_for(n, features.size) == "primal" or bool((diagonal == 0).any()))):
        _check_memory("primal", features.size, features.x.device)
        if cross:
            features.hold()
        return PrimalCurvature(features, diagonal)
    _check_memory("dual", n, features.x.device)
    if (diagonal == 0).any():
        raise ValueError(
            f"l2 must be positive everywhere in the dual form, entry {int((diagonal == 0).nonzero()[0])} is 0"
        )
    rows = kernel_rows(features, wanted=form == "kernels") if form != "dual" else None
    return DualCurvature(features, diagonal) if rows is None else KernelCurvature(features, diagonal, rows)


def fit_whitened(features: FeatureRows) -> Curvature:
    """I + sum_i psi_i psi_i^T over the rows of `features`, whose coordinates no kernel of layers knows."""
    diagonal = torch.ones(features.size, dtype=torch.float64, device=features.x.device)
    return factorise(features, diagonal, form=form_for(features.count * features.outputs, features.size))


def form_for(rows: int, size: int) -> str:
    """The smaller form for n rows of D parameters, and of equal ones the more exact."""
    return "primal" if size <= rows else "dual"


def restore_full(features: FeatureRows, state: dict[str, Tensor]) -> Curvature:
    """The structure whose `state()` was saved, over the same rows."""
    if "primal_factor" in state:
        features.hold()
        return PrimalCurvature(features, state["l2"], factor=state["primal_factor"])
    if "kernel_factor" in state:
        rows = kernel_rows(features, wanted=True)
        assert rows is not None
        return KernelCurvature(features, state["l2"], rows, factor=state["kernel_factor"])
    return DualCurvature(features, state["l2"], factor=state["dual_factor"])


class PrimalCurvature:
    """H as a D x D Cholesky factor L: right for D <= N O."""

    name = "full, primal"
    stands_alone = True
    selective = True
    independent = False

    def __init__(self, features: FeatureRows, diagonal: Tensor, *, factor: Tensor | None = None):
        self.features = features
        self.diagonal = diagonal
        if factor is None:
            H = features.gram()
            H.diagonal().add_(diagonal)
            factor = cholesky(H, self._blame)
        self.factor = factor  # L, (D, D)
        self._slack: Tensor | None = None  # from the last pass of `refine`

    def slack(self) -> Tensor:
        """I - V_i, (N, O, O)."""
        slack, self._slack = self._slack, None
        if slack is None:
            slack = self._no_leverages()
            for rows, phi in self.features.chunks("leverages"):
                slack[rows] -= self.leverage(phi)
        return slack

    def leverage(self, phi: Tensor) -> Tensor:
        """V of test points (m, O, D): (m, O, O)."""
        whitened = self._whiten(phi)
        if phi.shape[1] == 1:
            return whitened.square_().sum(0).view(-1, 1, 1)
        return gram_blocks(whitened, phi.shape[1])

    def whiten(self, phi: Tensor) -> Tensor:
        """Rows psi with psi psi^T = phi H^-1 phi^T, for phi (m, O, D): (m, O, D)."""
        return self._whiten(phi).T.view(phi.shape)

    def query(self, phi: Tensor) -> Query:
        """Leverages and cross leverages of test points (m, O, D)."""
        m, O, _ = phi.shape
        columns = self._whiten(phi)  # L^-1 phi^T, (D, m O)
        V = gram_blocks(columns, O)
        solved = torch.linalg.solve_triangular(self.factor.T, columns, upper=True, out=columns)  # H^-1 phi^T
        return Query(V, cross_from(self.features, solved.T.view(m, O, -1)))

    def solve(self, vectors: Tensor) -> Tensor:
        """H^-1 times vectors (D,) or (D, m)."""
        columns = vectors.reshape(self.features.size, -1)
        return torch.cholesky_solve(columns, self.factor).view_as(vectors)

    def refine(self, e: Tensor, weights: Tensor, *, exactly: bool = True) -> tuple[Tensor, Tensor]:
        """The step to the ridge solution and the residuals there.

        A second solve, from the gradient at the first solution, takes the rounding of the first one away: far from
        the minimum the step is large, and the residuals that it leaves may be small. The last pass over the rows has
        their leverages too, which spares `slack` one.
        """
        step, refined = torch.zeros_like(weights), e.clone()
        descent = -self.diagonal * weights
        for rows, phi in self.features.chunks("refinement"):
            descent += torch.einsum("nod,no->d", phi.double(), e[rows])
        if exactly:
            step += self.solve(descent)
            descent = -self.diagonal * (weights + step)
            for rows, phi in self.features.chunks("refinement"):
                P = phi.double()
                descent += torch.einsum("nod,no->d", P, e[rows] - P @ step)
        step += self.solve(descent)
        slack = self._no_leverages() if self._slack is None else None
        for rows, phi in self.features.chunks("refinement"):
            refined[rows] = e[rows] - phi.double() @ step
            if slack is not None:
                slack[rows] -= self.leverage(phi)
        self._slack = slack if slack is not None else self._slack
        return step, refined

    def _no_leverages(self) -> Tensor:
        """I for each row, (N, O, O)."""
        eye = torch.eye(self.features.outputs, dtype=torch.float64, device=self.factor.device)
        return eye.repeat(self.features.count, 1, 1)

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


def _check_memory(form: str, size: int, device: torch.device) -> None:
    """Refuse a factor that the machine cannot hold."""
    check_held(
        COPIES[form] * 8 * size**2,
        device,
        by="curvature='full'",
        what=f"a {size} x {size} matrix",
        advice="curvature='kfac', 'last_layer' and 'low_rank' take far less, and so does the exact matrix of fewer "
        "parameters (see `parameters`)",
    )
