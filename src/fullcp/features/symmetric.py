"""The product P^T P at half its price, and a triangle copied over the other: all in the memory of the result."""

from __future__ import annotations

from torch import Tensor

# Blocks on the diagonal are computed whole: a sixteenth of the matrix wastes 3 % of the work, and blocks of less than
# 256 columns are no longer products at full speed.
_BLOCKS = 16
_NARROWEST = 256


def add_gram(S: Tensor, P: Tensor) -> None:
    """S += P^T P on and above the diagonal (somewhat below it, too), for S (D, D) and P (n, D)."""
    for cut in _cuts(len(S)):
        S[cut, cut.start :].addmm_(P[:, cut].T, P[:, cut.start :])


def mirror(S: Tensor) -> Tensor:
    """S (D, D) with what stands above the diagonal copied below it, in place."""
    for cut in _cuts(len(S)):
        corner = S[cut, cut]
        corner.copy_(corner.triu() + corner.triu(1).T)
        S[cut.stop :, cut] = S[cut, cut.stop :].T
    return S


def _cuts(size: int) -> list[slice]:
    """The columns in blocks."""
    width = max(_NARROWEST, -(-size // _BLOCKS))
    return [slice(start, min(start + width, size)) for start in range(0, size, width)]
