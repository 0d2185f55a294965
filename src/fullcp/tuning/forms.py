"""log det H and the effective numbers of parameters, for B networks at once, whatever the structure of the curvature.

With S = sum_i phi_i phi_i^T, one penalty l2_g for each group g of D_g parameters and H = S + diag(l2), a form knows

    log det H                                     (B,)
    gamma_g = D_g - l2_g tr_g(H^-1)               (B, G), the effective number of parameters of a group
    J_gk    = d gamma_g / d log l2_k              (B, G, G)

In the precisions d and the noise variance v of the Laplace approximation l2 = v d. Since A = S / v + diag(d) is H / v,
gamma depends on v and d through l2 alone: d gamma_g / d log d_k = J_gk and d gamma_g / d log v = sum_k J_gk.

All algebra is float64 and nothing is added to a matrix that cannot be factorised: its network gets NaN, the others
what is theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor


class Form(Protocol):
    """S of B networks in some structure.

    Attributes
    ----------
    sizes : Tensor (G,)
        D_g, the number of parameters of each group.
    exact_is_cheap : whether gamma costs no factorisation.
    """

    sizes: Tensor
    exact_is_cheap: bool

    def log_det(self, l2: Tensor) -> Tensor:
        """Log det H (B,) for penalties l2 (B, G)."""

    def determinant(self, l2: Tensor) -> tuple[Tensor, Tensor]:
        """Log det H (B,) and gamma (B, G)."""

    def slope(self, l2: Tensor) -> tuple[Tensor, Tensor]:
        """Gamma (B, G) and J (B, G, G), from one factorisation."""


class Spectral:
    """S that is diagonal in a fixed basis which respects the groups: l2 changes cost no factorisation.

    So it is with full curvature and one group, with diagonal curvature, and with Kronecker factors of weights and of
    biases apart.

    Parameters
    ----------
    eigenvalues : Tensor (B, r)
        Of S; those of parameters that are not among them are 0.
    group : Tensor (r,) of int
        The group of each eigenvalue.
    sizes : Tensor (G,) or sequence of int
        D_g, at least the number of eigenvalues of the group.
    """

    exact_is_cheap = True

    def __init__(self, eigenvalues: Tensor, group: Tensor, sizes: Tensor | Sequence[int]):
        self.eigenvalues = eigenvalues.double().clamp(min=0)
        self.group = group
        self.sizes = _as_sizes(sizes, eigenvalues)

    def log_det(self, l2: Tensor) -> Tensor:
        """Log det H (B,)."""
        return l2.log() @ self.sizes + torch.log1p(self._ratio(l2)).sum(1)

    def determinant(self, l2: Tensor) -> tuple[Tensor, Tensor]:
        """Log det H (B,) and gamma (B, G)."""
        ratio = self._ratio(l2)
        return l2.log() @ self.sizes + torch.log1p(ratio).sum(1), self._by_group(ratio / (1 + ratio))

    def slope(self, l2: Tensor) -> tuple[Tensor, Tensor]:
        """Gamma (B, G) and J (B, G, G), which is diagonal."""
        ratio = self._ratio(l2)
        part = ratio / (1 + ratio)
        return self._by_group(part), -torch.diag_embed(self._by_group(part / (1 + ratio)))

    def _ratio(self, l2: Tensor) -> Tensor:
        """Eigenvalues in units of the penalty, (B, r)."""
        return self.eigenvalues / l2[:, self.group]

    def _by_group(self, parts: Tensor) -> Tensor:
        """Sums (B, G) of what belongs to each group."""
        return parts.new_zeros(len(parts), len(self.sizes)).index_add_(1, self.group, parts)


class Gram:
    """S as D x D matrices: right where there are not many more parameters than rows.

    Parameters
    ----------
    S : Tensor (B, D, D)
    sizes : sequence of int
        D_g of consecutive columns, D in all.
    """

    exact_is_cheap = False

    def __init__(self, S: Tensor, sizes: Sequence[int]):
        self.S = S
        self.sizes = _as_sizes(sizes, S)
        self._group = torch.arange(len(sizes), device=S.device).repeat_interleave(self.sizes.long())  # of a column
        self._member = torch.nn.functional.one_hot(self._group, len(sizes)).double()  # (D, G)

    def log_det(self, l2: Tensor) -> Tensor:
        """Log det H (B,)."""
        return _run(lambda at: (_log_det(self._factor(l2, at)),), l2)[0]

    def determinant(self, l2: Tensor) -> tuple[Tensor, Tensor]:
        """Log det H (B,) and gamma (B, G)."""

        def run(at: slice) -> tuple[Tensor, Tensor]:
            L = self._factor(l2, at)
            return _log_det(L), torch.cholesky_inverse(L).diagonal(dim1=1, dim2=2) @ self._member

        log_det, traces = _run(run, l2)
        return log_det, self.sizes - l2 * traces

    def slope(self, l2: Tensor) -> tuple[Tensor, Tensor]:
        """Gamma (B, G) and J (B, G, G): l2_g l2_k |[H^-1]_gk|^2, less l2_g tr_g(H^-1) on the diagonal."""

        def run(at: slice) -> tuple[Tensor, Tensor]:
            inverse = torch.cholesky_inverse(self._factor(l2, at))
            traces = inverse.diagonal(dim1=1, dim2=2) @ self._member
            return traces, self._member.T @ (inverse.square_() @ self._member)  # |[H^-1]_gk|^2

        traces, blocks = _run(run, l2)
        J = l2.unsqueeze(2) * blocks * l2.unsqueeze(1) - torch.diag_embed(l2 * traces)
        return self.sizes - l2 * traces, J

    def _factor(self, l2: Tensor, at: slice) -> Tensor:
        H = self.S[at].clone()
        H.diagonal(dim1=1, dim2=2).add_(l2[at][:, self._group])
        return _cholesky(H)


class Kernels:
    """S by its kernels K_g = phi_g phi_g^T, n x n: right where parameters are many more than rows.

    With G = I + sum_g K_g / l2_g, log det H = sum_g D_g log l2_g + log det G and gamma_g = tr(K_g G^-1) / l2_g. Rows
    that a network does not have are zero in its kernels, and change nothing.

    Parameters
    ----------
    K : Tensor (B, G, n, n)
    sizes : sequence of int
        D_g.
    """

    exact_is_cheap = False

    def __init__(self, K: Tensor, sizes: Sequence[int]):
        self.K = K
        self.sizes = _as_sizes(sizes, K)

    def log_det(self, l2: Tensor) -> Tensor:
        """Log det H (B,)."""
        return l2.log() @ self.sizes + _run(lambda at: (_log_det(self._factor(l2, at)),), l2)[0]

    def determinant(self, l2: Tensor) -> tuple[Tensor, Tensor]:
        """Log det H (B,) and gamma (B, G)."""

        def run(at: slice) -> tuple[Tensor, Tensor]:
            L = self._factor(l2, at)
            return _log_det(L), torch.einsum("bgij,bij->bg", self.K[at], torch.cholesky_inverse(L))

        log_det, traces = _run(run, l2)
        return l2.log() @ self.sizes + log_det, traces / l2

    def slope(self, l2: Tensor) -> tuple[Tensor, Tensor]:
        """Gamma (B, G) and J (B, G, G): tr(M_g M_k) less gamma_g on the diagonal, with M_g = K_g G^-1 / l2_g."""

        def run(at: slice) -> tuple[Tensor, Tensor]:
            inverse = torch.cholesky_inverse(self._factor(l2, at))
            M = (self.K[at] @ inverse.unsqueeze(1)) / l2[at][:, :, None, None]
            return M.diagonal(dim1=2, dim2=3).sum(2), M.flatten(2) @ M.mT.flatten(2).mT

        gamma, products = _run(run, l2)
        return gamma, products - torch.diag_embed(gamma)

    def _factor(self, l2: Tensor, at: slice) -> Tensor:
        G = torch.einsum("bgij,bg->bij", self.K[at], 1 / l2[at])
        G.diagonal(dim1=1, dim2=2).add_(1.0)
        return _cholesky(G)


class Repeated:
    """The same S for each of m outputs that share no parameter, as in a last layer: one factorisation serves them all.

    Parameters
    ----------
    form : of one output.
    times : m, so that sizes, log det H and gamma are m times those of the form.
    """

    def __init__(self, form: Form, times: int):
        self.form, self.times = form, times
        self.sizes = times * form.sizes
        self.exact_is_cheap = form.exact_is_cheap

    def log_det(self, l2: Tensor) -> Tensor:
        """Log det H (B,)."""
        return self.times * self.form.log_det(l2)

    def determinant(self, l2: Tensor) -> tuple[Tensor, Tensor]:
        """Log det H (B,) and gamma (B, G)."""
        log_det, gamma = self.form.determinant(l2)
        return self.times * log_det, self.times * gamma

    def slope(self, l2: Tensor) -> tuple[Tensor, Tensor]:
        """Gamma (B, G) and J (B, G, G)."""
        gamma, J = self.form.slope(l2)
        return self.times * gamma, self.times * J


class WithRest:
    """S known but for a positive semidefinite rest, of which no more than traces and ranks are known, from above.

    In scaled columns det(I + S_k + E) <= det(I + S_k) det(I + E), and of all E with these traces and ranks in the
    groups, that of equal eigenvalues has the largest determinant. So log det H is at most what this form says (and at
    least what S_k alone says): the marginal likelihood is a lower bound, and its maximum a safe one, where without the
    rest a group that S_k misses would seem to need no penalty. Small rests count as they are, to first order.

    Parameters
    ----------
    form : of S_k.
    traces : Tensor (B, G)
        Of the rest, in the columns of each group.
    ranks : Tensor (G,)
        Of the rest, at most.
    """

    def __init__(self, form: Form, traces: Tensor, ranks: Tensor):
        self.form = form
        self.sizes, self.exact_is_cheap = form.sizes, form.exact_is_cheap
        self.ranks = ranks.to(traces)
        self.each = traces.clamp(min=0) / self.ranks.clamp(min=1)  # the equal eigenvalues

    def log_det(self, l2: Tensor) -> Tensor:
        """Log det H (B,), from above."""
        return self.form.log_det(l2) + torch.log1p(self.each / l2) @ self.ranks

    def determinant(self, l2: Tensor) -> tuple[Tensor, Tensor]:
        """Log det H (B,) and gamma (B, G), its derivative."""
        log_det, gamma = self.form.determinant(l2)
        ratio = self.each / l2
        return log_det + torch.log1p(ratio) @ self.ranks, gamma + self.ranks * ratio / (1 + ratio)

    def slope(self, l2: Tensor) -> tuple[Tensor, Tensor]:
        """Gamma (B, G) and J (B, G, G)."""
        gamma, J = self.form.slope(l2)
        ratio = self.each / l2
        part = self.ranks * ratio / (1 + ratio)
        return gamma + part, J - torch.diag_embed(part / (1 + ratio))


def _as_sizes(sizes: Tensor | Sequence[int], like: Tensor) -> Tensor:
    return torch.as_tensor(sizes, dtype=torch.float64, device=like.device)


def _run(run: Callable[[slice], tuple[Tensor, ...]], l2: Tensor) -> tuple[Tensor, ...]:
    """What `run` finds for the networks of each slice, put together.

    A CPU takes one network at a time: its caches hold one (a fifth faster at D = 751), and memory the copies of one.
    """
    length = len(l2) if l2.is_cuda else 1
    slices = [slice(start, start + length) for start in range(0, len(l2), length)]
    return tuple(torch.cat(parts) for parts in zip(*map(run, slices), strict=True))


def _log_det(L: Tensor) -> Tensor:
    """Log determinants (B,) from the factors (B, n, n)."""
    return 2 * L.diagonal(dim1=1, dim2=2).log().sum(1)


def _cholesky(H: Tensor) -> Tensor:
    """Lower factors of H (b, n, n); NaN where there is none."""
    L, info = torch.linalg.cholesky_ex(H)
    bad = (info > 0) | ~L.diagonal(dim1=1, dim2=2).isfinite().all(1)  # the root of an infinite pivot is one
    return L.masked_fill(bad[:, None, None], torch.nan) if bool(bad.any()) else L
