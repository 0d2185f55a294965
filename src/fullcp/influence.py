"""Scores and changepoints: the closed forms of docs/theory.md, and nothing else.

Notation, for N training points and m test points, one output:

    e  (N,)     training residuals e_i
    s  (N,)     slack 1 - h_i of the training leverages
    h  (m,)     leverages of the test points
    c  (m, N)   cross leverages
    r           y - f, the candidate label relative to the prediction

Adding (x, y) makes the residuals rho_i = e_i - c_i r / (1 + h) and rho_new = r / (1 + h). A score divides rho_i by
u_i = 1, 1 - hbar_i or sqrt(1 - hbar_i), where 1 - hbar_i = s_i + c_i^2 / (1 + h), and rho_new by its like with
1 - hbar_new = 1 / (1 + h). Multiplied through by (1 + h) u_i, training point i scores as high as the new one where

    e_i (1 + h) - c_i r  >=  P_i r                (signed)
    |e_i (1 + h) - c_i r|  >=  P_i |r|            (absolute)

with the one quantity that knows the score,

    P_i = 1                              standard
    P_i = (1 + h) s_i + c_i^2            deleted
    P_i = sqrt((1 + h) s_i + c_i^2)      studentized

so that every changepoint is e_i (1 + h) / (P_i + c_i) or -e_i (1 + h) / (P_i - c_i). Where (1 + h) s_i + c_i^2 <= 0
(approximate curvature only) the deleted and studentized scores do not exist, and the point counts for every label.

ACP in its direct form leaves the new point out of H: the step is r H^-1 phi, and the residuals become, to first order,
e_i - c_i r and (1 - h) r. Training point i scores as high as the new one where

    e_i - c_i r  >=  (1 - h) r            (signed)
    |e_i - c_i r|  >=  |1 - h| |r|        (absolute)
"""

from __future__ import annotations

import torch
from torch import Tensor

SCORES = ("standard", "deleted", "studentized")
RESIDUALS = ("absolute", "signed")
INF = float("inf")
# Bounds leave room for rounding: leverages and cross leverages come by different ways, and the former may be those of
# float32 gradients. (What bounds lose is nothing; where even that is too little, an answer moves by no more than that.)
_LEEWAY = 1e-6
_CANCELLING = 0.01  # slack: where it is s, P + c loses a factor of 1 / s of its digits at the most


def signed_changepoints(score: str, e: Tensor, s: Tensor, c: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """Where signed residuals tie: training point i counts up to r_i for the upper end, from r_i on for the lower.

    Returns
    -------
    lower, upper : Tensor (m, N)
        The same numbers r_i = e_i (1 + h) / (P_i + c_i), but for points with P_i + c_i <= 0 (or without a score),
        which contribute the whole line: -inf in `lower`, inf in `upper`.
    """
    P, missing = _pivot(score, s, c, h)
    d = _sum(score, P, c, s, h, out=P)
    r = (e * (1 + h).unsqueeze(1)).div_(d)
    if missing is None and not _some(d <= 0):
        return r, r
    whole = (d <= 0) if missing is None else (d <= 0) | missing
    return _with_whole_lines(r, r, whole)


def absolute_changepoints(score: str, e: Tensor, s: Tensor, c: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """Where absolute residuals tie: the set of labels for which training point i counts, by its two ends.

    Returns
    -------
    left, right : Tensor (m, N)
        The set S_i = {r : score_i >= score_new} is [left, right] where left <= right. Where |c_i| > P_i it is the
        union of two rays, (-inf, right] and [left, inf), and left > right says so. Every S_i contains r = 0.
    """
    P, missing = _pivot(score, s, c, h)
    g = e * (1 + h).unsqueeze(1)
    t = torch.where(g < 0, -c, c)
    minus = _sum(score, P, t, s, h, sign=-1)
    return _absolute_ties(g.abs_(), _sum(score, P, t, s, h, out=P), minus, e == 0, missing)


def _absolute_ties(
    size: Tensor, plus: Tensor, minus: Tensor, none: Tensor, missing: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The ends -|g| / (P - t) and |g| / (P + t) of {r : |g - c r| >= P |r|}, t = c or -c as g > 0 or < 0, (m, N).

    `none` says which rows have g = 0, (N,); where `missing` it is the whole line. |g| is overwritten.
    """
    whole = missing
    if _some(none):
        whole = none & ((plus <= 0) | (minus <= 0))
        whole = whole if missing is None else whole | missing
    left, right = (size / minus).neg_(), size.div_(plus)
    return (left, right) if whole is None else _with_whole_lines(left, right, whole)


def _pivot(score: str, s: Tensor, c: Tensor, h: Tensor) -> tuple[Tensor, Tensor | None]:
    """P (m, N), and a mask of the points whose score does not exist."""
    if score == "standard":
        return torch.ones_like(c), None
    P = (s * (1 + h).unsqueeze(1)).addcmul_(c, c)  # (1 + h) (1 - hbar_i)
    missing = P <= 0 if _some(s <= 0) else None
    if score == "studentized":
        P = (P if missing is None else P.clamp_(min=0)).sqrt_()
    return P, missing if missing is not None and _some(missing) else None


def _sum(score: str, P: Tensor, c: Tensor, s: Tensor, h: Tensor, *, sign: int = 1, out: Tensor | None = None) -> Tensor:
    """P + sign c (m, N), to the last digits where it is a small difference of numbers that are not.

    For studentized scores (P + c) (P - c) = (1 + h) s_i: next to leverage 1, one factor follows from the other. (For
    deleted ones it is a sum of terms of either sign, and nothing is to be had.)
    """
    near = s < _CANCELLING
    if score != "studentized" or not _some(near):
        return torch.add(P, c, alpha=sign, out=out)
    some: slice | Tensor = slice(None) if s.device.type == "cuda" else near.nonzero()[:, 0]
    other = torch.sub(P[:, some], c[:, some], alpha=sign)
    found = torch.add(P, c, alpha=sign, out=out)
    small = (sign * c[:, some] < 0) & near[some]
    found[:, some] = torch.where(small, s[some] * (1 + h).unsqueeze(1) / other, found[:, some])
    return found


def changepoint_bounds(
    score: str, e: tuple[Tensor, Tensor], s: tuple[Tensor, Tensor], h: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Between what numbers r_i / (1 + h) lies, whatever the cross leverage, by |c_i| <= sqrt(h_i h) alone.

    With q = (1 + h) s_i and |c| <= C, P + c runs through [1 - C, 1 + C] for standard scores, from sqrt(q + C^2) - C to
    sqrt(q + C^2) + C for studentized ones, and for deleted ones up to q + C^2 + C, from where q + c^2 + c is least. For
    the same reasons P - c does, so that for absolute residuals (e being |e|) the same bounds hold for both ends.

    Parameters
    ----------
    e, s, h : pairs of tensors that broadcast
        The least and the largest residual, slack and leverage of the test point; equal for a single point.

    Returns
    -------
    low, high
        -inf and inf where the point may contribute the whole line, or two rays.
    """
    C = ((1 - s[0] + _LEEWAY).clamp_(min=0) * h[1]).sqrt_().mul_(1 + _LEEWAY).add_(_LEEWAY * _LEEWAY)
    if score == "standard":
        least, most = 1 - C, 1 + C
    else:
        q_least, q_most = s[0] * (1 + h[0]), s[1] * (1 + h[1])
        if score == "studentized":
            least = q_least / (C + (C * C + q_least.clamp(min=0)).sqrt_())  # sqrt(q + C^2) - C
            most = C + (C * C + q_most.clamp(min=0)).sqrt_()
        else:
            at = C.clamp(max=0.5)
            least, most = q_least + at * at - at, q_most + C * C + C
        least = torch.where(s[0] > _LEEWAY * _LEEWAY, least, -INF)  # next to 0, P + c is lost to rounding
    low, high = (e[0] / torch.where(e[0] > 0, most, least)), (e[1] / torch.where(e[1] > 0, least, most))
    room = _LEEWAY * _LEEWAY
    low, high = low - room * low.abs(), high + room * high.abs()
    return low.masked_fill_(least <= 0, -INF), high.masked_fill_(least <= 0, INF)


def _some(mask: Tensor) -> bool:
    """Whether to look after entries of a mask; on a GPU, asking it takes longer than looking after none."""
    return mask.device.type == "cuda" or bool(mask.any())


def _with_whole_lines(lower: Tensor, upper: Tensor, whole: Tensor) -> tuple[Tensor, Tensor]:
    if not _some(whole):
        return lower, upper
    return lower.masked_fill(whole, -INF), upper.masked_fill(whole, INF)


def signed_changepoints_blocks(score: str, e: Tensor, S: Tensor, C: Tensor, V: Tensor) -> tuple[Tensor, Tensor]:
    """The same for O outputs (paper, appendix on multi-output regression), signed residuals.

    The residuals become rho_i = e_i - B_i r and rho_new = M r, M = (I + V)^-1, B_i = C_i M, each multiplied by
    (I - Vbar)^-1 (deleted) or its symmetric root (studentized), I - Vbar_i = S_i + C_i M C_i^T, I - Vbar_new = M.
    The changepoint is the vector r_i = (B_new + B_i)^-1 e_i in these terms. As in the paper it counts where
    B_new + B_i is positive definite (its symmetric part is, B_i having no symmetry of its own); elsewhere the point
    contributes the whole line to every output.

    Parameters
    ----------
    e : Tensor (N, O)
    S : Tensor (N, O, O)
        Slack I - V_i.
    C : Tensor (m, N, O, O)
        Cross leverages.
    V : Tensor (m, O, O)
        Leverages of the test points.

    Returns
    -------
    lower, upper : Tensor (m, N, O)
    """
    eye = torch.eye(e.shape[1], dtype=e.dtype, device=e.device)
    M = torch.linalg.inv(eye + V).unsqueeze(1)  # (m, 1, O, O)
    B = C @ M
    a = e.expand(len(C), *e.shape)  # (m, N, O)
    missing = None
    if score == "standard":
        B_new = M.expand_as(B)
    else:
        values, Q = torch.linalg.eigh(S + B @ C.mT)  # I - Vbar_i
        missing = (values <= 0).any(-1)
        power = -1.0 if score == "deleted" else -0.5
        W = (Q * values.clamp(min=torch.finfo(e.dtype).tiny).pow(power).unsqueeze(-2)) @ Q.mT
        B, a = W @ B, (W @ a.unsqueeze(-1)).squeeze(-1)
        B_new = eye.expand_as(B) if score == "deleted" else _root(M).expand_as(B)
    slope = B_new + B
    whole = ~(torch.linalg.eigvalsh(slope + slope.mT)[..., 0] > 0)
    if missing is not None:
        whole |= missing
    slope = torch.where(whole[..., None, None], eye, slope)
    r = torch.linalg.solve(slope, a.unsqueeze(-1)).squeeze(-1)
    return _with_whole_lines(r, r, whole.unsqueeze(-1))


def _root(M: Tensor) -> Tensor:
    """The symmetric square root of positive definite matrices."""
    values, Q = torch.linalg.eigh(M)
    return (Q * values.sqrt().unsqueeze(-2)) @ Q.mT


def score_lines(score: str, e: Tensor, s: Tensor, c: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The scores themselves as functions of r: |A_i - B_i r| for training point i, b |r| for the new one.

    Returns
    -------
    A, B : Tensor (m, N)
        A_i = e_i / u_i and B_i = c_i / (u_i (1 + h)); nan where the score does not exist.
    b : Tensor (m,)
    """
    lift = (1 + h).unsqueeze(1)
    gap = s + c.square() / lift  # 1 - hbar_i
    u = {"standard": torch.ones_like(gap), "deleted": gap, "studentized": gap.clamp(min=0).sqrt()}[score]
    if score != "standard":
        u = u.masked_fill(gap <= 0, float("nan"))
    return e / u, c / (u * lift), own_weight(score, h)


def own_weight(score: str, h: Tensor) -> Tensor:
    """b, what the new point's own score is as a multiple of |r|, for leverages h of any shape."""
    return {"standard": 1 / (1 + h), "deleted": torch.ones_like(h), "studentized": (1 + h).rsqrt()}[score]


def direct_changepoints(residuals: str, e: Tensor, c: Tensor, h: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Where ACP's linearised residuals tie: for each of T tails the ends of the set of r in which point i counts.

    Returns
    -------
    list of (left, right), Tensor (m, N) each
        Absolute: [left, right] or two rays, as in `absolute_changepoints`. Signed: where training point i scores at
        least as high, and where at most, half-lines, all of r or none (left = right = inf).
    """
    s = (1 - h).unsqueeze(1)
    if residuals == "signed":
        slope = s + c
        return [_half_line(e, slope), _half_line(-e, -slope)]
    P = s.abs()
    t = torch.where(e < 0, -c, c)
    return [_absolute_ties(e.abs().expand_as(c).clone(), P + t, P - t, e == 0, P == 0)]


def _half_line(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The ends (left, right) of {r : a >= b r}, for a (N,) and b (m, N)."""
    end = a / b
    level = torch.where(a >= 0, -INF, INF).to(b.dtype)  # where b = 0, all r or none
    left = torch.where(b > 0, -INF, torch.where(b < 0, end, level))
    return left, torch.where(b > 0, end, INF)
