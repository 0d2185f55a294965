"""Cholesky factors of H and G: no jitter, and a refusal that says what is to blame."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fullcp.curvature.base import NotPositiveDefiniteError

LEAST_IN_DUAL = 1e3  # what `cholesky` asks for there, because slacks are read off the inverse


def gram_blocks(columns: Tensor, outputs: int) -> Tensor:
    """The O x O blocks of columns^T columns, (m, O, O), for columns (d, m O)."""
    blocks = columns.view(len(columns), -1, outputs)
    if outputs == 1:
        return blocks.square().sum(0).unsqueeze(2)
    return torch.einsum("dmo,dmp->mop", blocks, blocks)


def cholesky(H: Tensor, blame: Callable[[int], str], *, least: float = 1.0) -> Tensor:
    """Lower factor of H, of which the lower triangle counts, in H's own memory; no jitter is ever added.

    A pivot that keeps less than `least` D eps of its diagonal entry is rounding noise: the factor would be one of
    chance. The dual form asks for more.
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
