"""Low-rank curvature, for many rows and many parameters: H = diag(l2)^(1/2) (I + U diag(lambda) U^T) diag(l2)^(1/2).

U diag(lambda) U^T is the Nystrom approximation S'_k of S' = sum_i phi'_i phi'_i^T, phi' = phi / sqrt(l2), from products
with S' alone. It has S'_k <= S', so that leverages come out too large, never too small, and by how much can be told:
with u = H_k^-1 phi and b = u^T (H - H_k) u,

    h_k^2 / (h_k + b)  <=  h  <=  h_k

(from below: h = max_v 2 v^T phi - v^T H v, taken along u). One pass over the rows has b for some of them.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from fullcp.curvature.base import NotPositiveDefiniteError
from fullcp.curvature.eigen import EigenCurvature, expand_over
from fullcp.curvature.nystrom import LowRank, Product, basis
from fullcp.curvature.ridge import exact_solve
from fullcp.features import FeatureRows, gram_block_product
from fullcp.memory import in_words, rows_within

NAME = "low_rank"
_FIRST = 64  # ranks to try: this one, twice as many, ...
_GOOD = 0.01  # until leverages are known to this share
_POOR = 0.1  # beyond, the user is told
_SAMPLE = 32  # rows to look at
_COPIES = 4  # of the factor, at the peak of a fit
_ROUNDING = 1e-2  # of S' that H may hold, in units of l2


class LowRankWarning(UserWarning):
    """Leverages by low-rank curvature may be far too large: the rank is too small."""


@dataclass(frozen=True)
class LeverageError:
    """How wrong leverages can be, by bounds on a sample of training rows: from 0 to 1, which tells nothing.

    Attributes
    ----------
    largest, mean : float
        Of (h_k - h) / h_k.
    slack : float
        The mean of (s - s_k) / s, s = 1 - h: what deleted and studentized scores feel.
    rows : int
        How many rows the sample has: `largest` is the largest of these, others may exceed it.
    """

    largest: float
    mean: float
    slack: float
    rows: int = _SAMPLE

    @property
    def seen(self) -> str:
        """The size of the sample, in words."""
        return f"{self.rows} rows" if self.rows > 1 else "1 row"

    @property
    def is_small(self) -> bool:
        """Whether a larger rank would change little."""
        return max(self.mean, self.slack) <= _GOOD

    @property
    def is_large(self) -> bool:
        """Whether intervals may suffer."""
        return max(self.mean, self.slack) > _POOR


class LowRankCurvature(EigenCurvature):
    """H_k from the Nystrom approximation of S'; in scaled columns its eigenvectors are U, and all others have value 1.

    Parameters
    ----------
    features : gradients of the training rows.
    approximation : of S', in columns scaled by 1 / sqrt(l2).
    diagonal : Tensor (D,)
        The penalty, positive.
    error : if it is known; otherwise it takes a pass over the rows.

    Attributes
    ----------
    error : LeverageError
    rank : k

    Examples
    --------
    >>> import fullcp
    >>> _ = torch.manual_seed(0)
    >>> X = torch.randn(60, 3)
    >>> cp = fullcp.FullConformalRegressor(torch.nn.Linear(3, 1), curvature="low_rank", l2=1.0)
    >>> curvature = cp.conformalize(X, X.sum(1)).curvature_
    >>> curvature.rank, curvature.error.is_small
    (4, True)
    """

    def __init__(
        self, features: FeatureRows, approximation: LowRank, diagonal: Tensor, *, error: LeverageError | None = None
    ):
        self.features, self.diagonal = features, diagonal
        self.root = diagonal.rsqrt()  # 1 / sqrt(l2), (D,)
        self.U, self.eigenvalues = approximation.vectors, approximation.eigenvalues  # (D, k), (k,)
        self.shrink = -torch.expm1(-torch.log1p(self.eigenvalues) / 2)  # 1 - (1 + lambda)^-1/2
        self._check_rounding()
        self.error = error or self._look()
        by = self.error
        self.name = (
            f"low rank, {self.rank} of {len(self.U)}, leverages known to {by.mean:.2g} (at worst {by.largest:.2g} of "
            f"{by.seen})"
        )

    def __repr__(self) -> str:
        return f"<{self.name}>"

    @property
    def rank(self) -> int:
        """k, the number of eigenvectors kept."""
        return len(self.eigenvalues)

    def over_estimate(self, phi: Tensor) -> Tensor:
        """Bounds on h_k - h of rows phi (m, O, D), output by output, (m, O): a pass over the training rows."""
        self._check_rows()
        whitened = self._whiten(phi.double())
        V = self._turn(whitened).flatten(0, 1).T  # (I + S'_k)^-1 phi'^T, (D, m O)
        h = whitened.square().sum(2)  # (m, O)
        exact = (V * _scaled_product(self.features, self.root)(V)).sum(0)
        b = (exact - ((self.U.T @ V).square() * self.eigenvalues.unsqueeze(1)).sum(0)).view_as(h)
        b = b.clamp(min=0)  # what rounding took below zero is zero
        return h * b / (h + b).clamp(min=torch.finfo(h.dtype).tiny)

    def exact_leverage(self, phi: Tensor) -> Tensor:
        """V = phi H^-1 phi^T of test points phi (m, O, D), (m, O, O), for the exact H: to compare with, not for speed.

        By conjugate gradients on the training rows, with this curvature as the preconditioner.
        """
        m, O, D = phi.shape
        size = rows_within(self.features.memory // 8, 64 * O * D, at_most=m)
        parts = []
        for start in range(0, m, size):
            P = phi[start : start + size].double()
            solved = self.exact_solve(P.flatten(0, 1).T)  # (D, m O)
            V = P @ solved.T.view_as(P).mT
            parts.append((V + V.mT) / 2)
        return torch.cat(parts)

    def exact_solve(self, vectors: Tensor) -> Tensor:
        """H^-1 times vectors (D,) or (D, m) for the exact H, as `exact_leverage` does."""
        self._check_rows()
        columns = vectors.reshape(self.features.size, -1)
        return exact_solve(self.features, self.diagonal, self.solve, columns).view_as(vectors)

    def state(self) -> dict[str, Tensor]:
        """Eigenvalues, eigenvectors, the penalty and the error."""
        error = self.U.new_tensor([self.error.largest, self.error.mean, self.error.slack, self.error.rows])
        return {
            "low_rank.vectors": self.U,
            "low_rank.eigenvalues": self.eigenvalues,
            "low_rank.error": error,
            "l2": self.diagonal,
        }

    def _whiten(self, v: Tensor) -> Tensor:
        """v diag(l2)^-1/2 (I + S'_k)^-1/2 for rows v (..., D)."""
        return self._turn(v * self.root)

    def _whiten_back(self, v: Tensor) -> Tensor:
        """v (I + S'_k)^-1/2 diag(l2)^-1/2 for rows v (..., D)."""
        return self._turn(v) * self.root

    def _turn(self, v: Tensor) -> Tensor:
        """v (I + S'_k)^-1/2 for rows v (..., D)."""
        return v - ((v @ self.U) * self.shrink) @ self.U.T

    def _look(self) -> LeverageError:
        """The error on rows spread over the range of the predictions, whose choice no order of rows can change."""
        features = self.features
        most = rows_within(features.memory // 8, 64 * features.outputs * features.size, at_most=_SAMPLE)
        order = features.predictions[:, 0].argsort()
        picks = torch.linspace(0, features.count - 1, min(most, features.count)).round().long().to(order.device)
        phi = features.jacobian(features.x[order[picks].tolist()])[1]
        over = self.over_estimate(phi)  # (m, O)
        h = self._whiten(phi.double()).square().sum(2)
        relative = over / h.clamp(min=torch.finfo(h.dtype).tiny)
        slack = over / torch.where(h < 1, 1 - h + over, over).clamp(min=torch.finfo(h.dtype).tiny)
        return LeverageError(float(relative.amax()), float(relative.mean()), float(slack.mean()), len(phi))

    def _check_rows(self) -> None:
        """Refuse what needs training rows where none were saved."""
        if self.features.count == 0:
            raise ValueError("the exact curvature needs the training rows, which were not saved: fit again")

    def _check_rounding(self) -> None:
        """Refuse an l2 that is lost in the rounding of S."""
        largest = float(self.eigenvalues[0]) if self.rank else 0.0
        if self.rank * torch.finfo(self.U.dtype).eps * largest > _ROUNDING:
            raise NotPositiveDefiniteError(
                f"l2 is too small for curvature='low_rank': at its smallest, {float(self.diagonal.min()):.3g}, it is "
                "less than the rounding of the sum of phi phi^T in float64; raise it"
            )


def fit_low_rank(features: FeatureRows, l2: object, *, cross: bool = True, rank: int | None = None) -> LowRankCurvature:
    """The low-rank approximation of H over the rows of `features`; see `fullcp.curvature.fit_curvature`.

    Parameters
    ----------
    rank : int or None
        With None it grows until leverages are known to one per cent, or the factor takes a quarter of the memory
        budget; at the smaller of D and N O it is exact.
    """
    diagonal = expand_over(features, l2)
    if (diagonal == 0).any():
        raise ValueError(
            f"l2 must be positive everywhere with curvature='low_rank', entry {int((diagonal == 0).nonzero()[0])} is 0"
        )
    ranks = low_rank_ranks(features, rank)
    root = diagonal.rsqrt()
    S = _scaled_product(features, root)
    factor = features.kept.pop(NAME, None)  # of S itself
    known = (
        root.new_empty(features.size, 0) if factor is None else LowRank.of_factor(root.unsqueeze(1) * factor).vectors
    )
    del factor
    for size in [size for size in ranks if size >= known.shape[1]] or ranks[-1:]:
        _hold_beside(features, size)
        fitted = LowRankCurvature(features, LowRank.of_products(S, basis(S, known, size)), diagonal)
        known = fitted.U
        if fitted.error.is_small:
            break
    if cross:
        features.hold()
    else:
        features.release()
    if fitted.error.is_large:
        _warn(fitted, rank)
    return fitted


def restore_low_rank(features: FeatureRows, state: dict[str, Tensor]) -> LowRankCurvature:
    """The structure whose `state()` was saved, over the same rows."""
    approximation = LowRank(state["low_rank.vectors"], state["low_rank.eigenvalues"])
    largest, mean, slack, *rows = state["low_rank.error"].tolist()
    error = LeverageError(largest, mean, slack, *map(int, rows))
    return LowRankCurvature(features, approximation, state["l2"], error=error)


def low_rank_ranks(features: FeatureRows, wanted: int | None = None) -> list[int]:
    """The ranks to try, in order: one if it is given, otherwise growing ones that fit the budget."""
    D, exact = features.size, min(features.size, features.count * features.outputs)
    if wanted is not None:
        rank = min(wanted, exact)
        if 8 * D * rank > features.memory:
            raise ValueError(
                f"curvature='low_rank:{wanted}' needs {in_words(8 * D * rank)} for a factor of {D} x {rank} numbers, "
                f"memory is {in_words(features.memory)}: raise memory or lower the rank"
            )
        return [rank]
    top = max(1, min(exact, features.memory // (4 * 8 * D)))
    found = [_FIRST]
    while 2 * found[-1] <= top:
        found.append(2 * found[-1])
    return [*[rank for rank in found if 1.5 * rank <= top], top]  # a last step that is worth its passes


def low_rank_factor(features: FeatureRows, rank: int) -> Tensor:
    """B (D, k) with B B^T the Nystrom approximation of S = sum_i phi_i phi_i^T, before l2 is known.

    The next call, and the next fit to the same `features`, start from it.
    """
    _hold_beside(features, rank)
    S = gram_block_product(features)
    known = features.kept.pop(NAME, None)
    if known is None:
        known = torch.empty(features.size, 0, dtype=torch.float64, device=features.x.device)
    else:
        known = torch.linalg.qr(known)[0]
    factor = features.kept[NAME] = LowRank.of_products(S, basis(S, known, rank)).factor
    return factor


def low_rank_error(features: FeatureRows, l2: object) -> LeverageError:
    """What leverages would lack with the factor that `low_rank_factor` found last and this l2."""
    diagonal = expand_over(features, l2)
    approximation = LowRank.of_factor(diagonal.rsqrt().unsqueeze(1) * features.kept[NAME])
    return LowRankCurvature(features, approximation, diagonal).error


def _hold_beside(features: FeatureRows, rank: int) -> None:
    """Keep the gradients over the passes to come, where half of the budget is enough for all else."""
    if 8 * _COPIES * features.size * rank <= features.memory // 2:
        features.hold()
    else:
        features.release()


def _scaled_product(features: FeatureRows, root: Tensor) -> Product:
    """V (D, m) -> S' V."""
    S, scale = gram_block_product(features), root.unsqueeze(1)
    return lambda V: S(scale * V).mul_(scale)


def _warn(fitted: LowRankCurvature, wanted: int | None) -> None:
    D, by = len(fitted.U), fitted.error
    rank = min(2 * (wanted or fitted.rank), D, fitted.features.count * fitted.features.outputs)
    bytes_needed = 8 * D * rank * (1 if wanted else 4)
    how = f"curvature='low_rank:{rank}'" if wanted else f"memory='{-(-bytes_needed // 10**9)}GB'"
    warnings.warn(
        f"curvature='low_rank' of rank {fitted.rank} may give leverages that are too large: by {by.mean:.1%} of "
        f"themselves ({by.largest:.1%} at worst of {by.seen}), which is {by.slack:.1%} of 1 - h. {how} allows "
        f"rank {rank}, whose factor takes {in_words(8 * D * rank)}, in about twice the time; a larger l2 needs a "
        "smaller rank",
        LowRankWarning,
        stacklevel=5,
    )
