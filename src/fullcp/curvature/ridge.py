"""The ridge solution of the linearised network, for curvature that is only near the Gauss-Newton matrix.

Preconditioned conjugate gradients on H Delta = phi^T e - diag(l2) theta, with exact products H v = phi^T (phi v) + l2 v
and the approximate H as the preconditioner. (One solve with the approximate H is worse than no refinement, as the paper
found; it descends by gradients instead.)
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from fullcp.features import FeatureRows, gram_block_product, gram_product, residual_product

# Of the gradient, in the norm of the preconditioner, relative to that at the trained weights. Residuals are then within
# some 1e-5 of their own size of the ridge solution's; each further digit takes another hundred steps or two.
TOLERANCE = 1e-6
EXACT = 1e-9  # where the solution itself is wanted; rounding allows some 1e-16 of the largest eigenvalue over l2
ROUGH = 0.1  # where the size of the step is all that is wanted
_MOST_STEPS = 5000
ROUGH_STEPS = 20  # at most
_MOST_ROUNDS = 3

Product = Callable[[Tensor], Tensor]


class RefinementWarning(UserWarning):
    """The ridge solution was not reached to the tolerance."""


def ridge_step(
    features: FeatureRows,
    diagonal: Tensor,
    precondition: Product,
    e: Tensor,
    weights: Tensor,
    *,
    exactly: bool = True,
    rough_steps: int = ROUGH_STEPS,
) -> tuple[Tensor, Tensor]:
    """The step Delta (D,) from weights theta (D,) to the ridge solution, and the residuals e - phi Delta (N, O).

    Products come without phi where the network lets them; the gradient that is to vanish is taken from phi itself,
    and a further round goes on from there if it does not. In the end it is below `TOLERANCE` times what it was.

    Parameters
    ----------
    features : gradients of the training rows.
    diagonal : Tensor (D,)
        l2.
    precondition : v (D,) -> nearly H^-1 v.
    e : Tensor (N, O)
    weights : Tensor (D,)
    exactly : bool
        Whether more than the size of the step is wanted. If not, phi is not formed where it need not be.
    rough_steps : how many steps of conjugate gradients tell that size.
    """
    S, residuals = gram_product(features), residual_product(features, with_phi=exactly)
    tolerance, most = (TOLERANCE, _MOST_STEPS) if exactly else (ROUGH, rough_steps)

    def at(step: Tensor) -> tuple[Tensor, Tensor]:
        """The residuals e - phi Delta, and minus the gradient of the ridge objective."""
        left, back = residuals(e, step)
        return left, back - diagonal * (weights + step)

    step = torch.zeros_like(weights)
    refined, descent = at(step)
    start = size = _norm(descent, precondition)
    for _ in range(_MOST_ROUNDS if exactly else 1):
        if size <= tolerance * start:
            break
        step += _conjugate_gradients(lambda v: S(v) + diagonal * v, precondition, descent, tolerance * start / 2, most)
        refined, descent = at(step)
        size = _norm(descent, precondition)
    if exactly and not size <= tolerance * start:
        warnings.warn(
            f"refinement came within {size / start:.2g} of the gradient it started from, {tolerance:.0e} was wanted: "
            "raise l2, or use curvature='full' or 'last_layer'",
            RefinementWarning,
            stacklevel=4,
        )
    return step, refined


def exact_solve(features: FeatureRows, diagonal: Tensor, precondition: Product, vectors: Tensor) -> Tensor:
    """H^-1 times vectors (D, m), all at once, where the Gauss-Newton matrix itself is known by its products alone.

    Residuals fall below `EXACT` times what they were, in the norm of the preconditioner.

    Parameters
    ----------
    features, diagonal : as in `ridge_step`.
    precondition : V (D, m) -> nearly H^-1 V.
    """
    S, l2 = gram_block_product(features), diagonal.unsqueeze(1)

    def product(V: Tensor) -> Tensor:
        return S(V).addcmul_(l2, V)

    solution, left = torch.zeros_like(vectors), vectors
    start = size = _norms(vectors, precondition)
    for _ in range(_MOST_ROUNDS):
        solution = solution + _conjugate_gradients(product, precondition, left, EXACT * start / 2, _MOST_STEPS)
        left = vectors - product(solution)  # its recursion in the steps drifts away from this
        size = _norms(left, precondition)
        if bool((size <= EXACT * start).all()):
            break
    else:
        worst = float((size / start).amax())
        warnings.warn(
            f"exact solves came within {worst:.2g} of what they started from, {EXACT:.0e} was wanted: raise l2",
            RefinementWarning,
            stacklevel=3,
        )
    return solution


def _norm(gradient: Tensor, precondition: Product) -> float:
    return float(_norms(gradient, precondition))


def _norms(r: Tensor, precondition: Product) -> Tensor:
    """Of r (D,) or each of its columns (D, m), in the norm of the preconditioner."""
    return (r * precondition(r)).sum(0).sqrt()


def _conjugate_gradients(H: Product, precondition: Product, b: Tensor, tolerance: float | Tensor, most: int) -> Tensor:
    """x with H x = b: the preconditioned residual falls below `tolerance`, or `most` steps are done.

    For b (D,), or for all columns of b (D, m) side by side, each with its own steps.
    """
    x, r = torch.zeros_like(b), b.clone()
    z = precondition(r)
    p, rz = z.clone(), (r * z).sum(0)
    for _ in range(most):
        going = rz > tolerance**2
        if not bool(going.any()):
            break
        Hp = H(p)
        a = torch.where(going, rz / (p * Hp).sum(0), 0.0)
        x += a * p
        r -= a * Hp
        z = precondition(r)
        rz, before = (r * z).sum(0), rz
        p = torch.where(going, z + (rz / before) * p, p)
    return x
