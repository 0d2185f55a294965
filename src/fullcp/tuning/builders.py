"""From gradients to the marginal likelihood: S or its kernels, summed over chunks of rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fullcp.curvature import (
    last_layer_gram,
    low_rank_factor,
    low_rank_ranks,
    penultimate_rows,
    read_structure,
    spectrum,
)
from fullcp.features import FeatureRows, kernel_rows
from fullcp.tuning.evidence import Evidence
from fullcp.tuning.forms import Form, Gram, Kernels, Repeated, Spectral, WithRest

STRUCTURES = ("layer", "scalar")

# Parameters a row up to which the primal form is the faster one. A climb with four groups takes 20 ms against 28 in the
# dual form at D = 401 = 1.5 n, and 15 against 11 at 2 n; 76 against 126 and 67 against 47 at D = 751.
_PRIMAL_UP_TO = {"layer": 1.75, "scalar": 1.0}


def evidence_of(features: FeatureRows, e: Tensor, structure: str = "layer", curvature: str = "full") -> Evidence:
    """The marginal likelihood of one network, B = 1.

    Parameters
    ----------
    features : gradients of the rows.
    e : Tensor (N, O)
        Residuals y - f.
    structure : "layer" or "scalar"
        One prior precision a parameter tensor, or one for all.
    curvature : of which structure S is, see `fullcp.curvature`; `features` must be of the parameters that it wants.
        The next fit of it to the same `features` takes up what is computed here. "low_rank" makes it a lower bound,
        close where the rank is large enough for H: see `WithRest`.
    """
    parameters = [p.detach().reshape(-1) for p in features.jacobian.parameters.values()]
    sizes, squares = _groups([len(p) for p in parameters], torch.cat(parameters).unsqueeze(0), structure)
    squared_error = e.double().square().sum().reshape(1)
    form = _form_of(features, e.numel(), sizes, curvature)
    return Evidence(form, squares, squared_error, torch.full_like(squared_error, e.numel()))


def _form_of(features: FeatureRows, observations: int, sizes: list[int], curvature: str) -> Form:
    """S of one network in the structure named."""
    word, rank = read_structure(curvature)
    if word == "low_rank":
        return _form_of_low_rank(features, low_rank_ranks(features, rank)[-1], sizes)
    if curvature in ("kfac", "diagonal"):
        eigenvalues, tensor = spectrum(features, curvature)
        return Spectral(eigenvalues.unsqueeze(0), tensor if len(sizes) > 1 else torch.zeros_like(tensor), sizes)
    if curvature == "last_layer":
        # Of one output; the others share it, and no parameter.
        outputs = features.outputs
        each = [size // outputs for size in sizes]
        if sum(each) > features.count:
            return Repeated(_form_of_kernels(_kernels(penultimate_rows(features), each).unsqueeze(0), each), outputs)
        return Repeated(_form_of_gram(last_layer_gram(features)[0].unsqueeze(0), each), outputs)
    if features.size <= observations:
        return _form_of_gram(features.gram(keep=True).unsqueeze(0), sizes)  # the curvature will want it too
    rows = kernel_rows(features)
    names = list(features.jacobian.parameters)
    K = rows.kernels([[name] for name in names] if len(sizes) > 1 else [names]) if rows else _kernels(features, sizes)
    return _form_of_kernels(K.unsqueeze(0), sizes)


def evidence_of_many(
    chunks: Iterable[tuple[Tensor, Tensor]],
    theta: Tensor,
    sizes: Sequence[int],
    observations: Tensor,
    *,
    structure: str = "layer",
    form: str | None = None,
) -> Evidence:
    """The marginal likelihood of B networks of one architecture, each on rows of its own.

    Parameters
    ----------
    chunks : pairs of gradients phi (B, n, O, D), in the networks' dtype, and residuals e (B, n, O)
        A row that a network does not have is zero in both.
    theta : Tensor (B, D)
        The weights.
    sizes : sequence of int
        D_g of the parameter tensors, in the order of the columns of phi.
    observations : Tensor (B,)
        Rows that a network has, times O.
    structure : "layer" or "scalar"
        One prior precision a parameter tensor, or one for all.
    form : "primal", "dual" or None
        S or its kernels; None takes the faster. The dual form holds the gradients of all rows.
    """
    sizes, squares = _groups(sizes, theta, structure)
    observations = observations.to(squares)
    if form is None:
        form = "primal" if theta.shape[1] <= _PRIMAL_UP_TO[structure] * float(observations.max()) else "dual"
    assert form in ("primal", "dual")
    squared_error = torch.zeros_like(observations)
    B, D = theta.shape
    S = squares.new_zeros(B, D, D) if form == "primal" else None
    held = []
    for phi, e in chunks:
        squared_error += e.double().square().sum((1, 2))
        if S is not None:
            P = phi.flatten(1, 2).double()  # (B, n O, D)
            S.baddbmm_(P.mT, P)
        else:
            held.append(phi.flatten(1, 2))
    if S is not None:
        return Evidence(_form_of_gram(S, sizes), squares, squared_error, observations)
    K = torch.stack([_kernels_of(list(rows), sizes) for rows in zip(*held, strict=True)])
    return Evidence(_form_of_kernels(K, sizes), squares, squared_error, observations)


def _groups(sizes: Sequence[int], theta: Tensor, structure: str) -> tuple[list[int], Tensor]:
    """D_g and |theta_g|^2 (B, G)."""
    assert structure in STRUCTURES
    if structure == "scalar":
        sizes = [sum(sizes)]
    parts = torch.split(theta.detach().double(), list(sizes), dim=1)
    return list(sizes), torch.stack([part.square().sum(1) for part in parts], 1)


def _form_of_gram(S: Tensor, sizes: list[int]) -> Form:
    return Gram(S, sizes) if len(sizes) > 1 else _spectral(S, sizes)


def _form_of_low_rank(features: FeatureRows, rank: int, sizes: list[int]) -> Form:
    """S = B B^T and a rest: the columns of B (D, k) are k rows of gradients as good as all, and have kernels."""
    B = low_rank_factor(features, rank)
    form = _form_of_kernels(_kernels_of([B.T], sizes).unsqueeze(0), sizes)
    squares = torch.zeros(features.size, dtype=torch.float64, device=B.device)
    for _, phi in features.chunks("marginal likelihood"):
        squares += phi.flatten(0, 1).double().square().sum(0)
    traces = torch.stack([part.sum() for part in torch.split(squares - B.square().sum(1), sizes)])
    left = min(features.size, features.count * features.outputs) - B.shape[1]  # the rank that the rest can have
    return WithRest(form, traces.unsqueeze(0), torch.tensor(sizes, device=B.device).clamp(max=left))


def _form_of_kernels(K: Tensor, sizes: list[int]) -> Form:
    return Kernels(K, sizes) if len(sizes) > 1 else _spectral(K[:, 0], sizes)


def _spectral(matrix: Tensor, sizes: list[int]) -> Spectral:
    """Of S or of the one kernel (B, n, n), whose eigenvalues other than 0 are the same."""
    known = matrix.isfinite().all(2).all(1)[:, None, None]  # LAPACK would refuse all of them for one
    eigenvalues = torch.linalg.eigvalsh(matrix.where(known, 0.0)).where(known[:, 0], torch.nan)
    return Spectral(eigenvalues, torch.zeros(eigenvalues.shape[1], dtype=torch.long, device=matrix.device), sizes)


def _kernels_of(chunks: list[Tensor], sizes: list[int]) -> Tensor:
    """K_g (G, n, n) of one network from its gradients (n O, D) in chunks."""
    parts = torch.split(torch.cat(chunks), sizes, dim=1)
    return torch.stack([P @ P.T for P in (part.double() for part in parts)])


def _kernels(features: FeatureRows, sizes: list[int]) -> Tensor:
    """K_g (G, n, n) of one network within its memory budget."""
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
