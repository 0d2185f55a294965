"""Products with S = sum_i phi_i^T phi_i over all rows, without phi where the network lets them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import functional_call, jvp, vjp

from fullcp.features.jacobian import Jacobian
from fullcp.features.network import Network, normal
from fullcp.features.outputs import as_rows
from fullcp.features.preserve import parameters_by_name
from fullcp.features.rows import FeatureRows
from fullcp.memory import rows_within

_PROBE_ROWS = 4
_AGREEMENT = 1e-3  # relative; the products are in float64 whatever the network's own precision


def gram_product(features: FeatureRows) -> Callable[[Tensor], Tensor]:
    """v (D,) -> S v: by forward and backward derivatives in float64, or from phi where the network refuses them."""
    jacobian = features.jacobian
    width = _rows_per_pass(features)

    def without_phi(v: Tensor) -> Tensor:
        found = torch.zeros_like(v)
        for start in range(0, features.count, width):
            found += _product(jacobian, features.x[start : start + width], v)
        return found

    def from_phi(v: Tensor) -> Tensor:
        return _from_phi(features, v.unsqueeze(1)).squeeze(1)

    return without_phi if _trusted(features) else from_phi


def residual_product(
    features: FeatureRows, *, with_phi: bool = False
) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(e (N, O), v (D,)) -> u = e - phi v of all rows, and phi^T u: in one pass, without phi unless that is wanted."""
    jacobian, width = features.jacobian, _rows_per_pass(features)

    def without_phi(e: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        left, found = torch.empty_like(e), torch.zeros_like(v)
        for start in range(0, features.count, width):
            rows = slice(start, start + width)
            left[rows], back = _residual_product(jacobian, features.x[rows], v, e[rows])
            found += back
        return left, found

    def from_phi(e: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        left, found = torch.empty_like(e), torch.zeros_like(v)
        for rows, phi in features.chunks("refinement"):
            P = phi.double()  # (n, O, D)
            left[rows] = e[rows] - P @ v
            found += P.flatten(0, 1).T @ left[rows].flatten()
        return left, found

    return from_phi if with_phi or not _trusted(features) else without_phi


def gram_block_product(features: FeatureRows) -> Callable[[Tensor], Tensor]:
    """V (D, m) -> S V: a chunk of phi serves all vectors; where not a row of it fits, they go one by one without."""
    if features.jacobian.bytes_per_row() <= features.memory // 8:
        return lambda V: _from_phi(features, V)
    product = gram_product(features)  # networks of that size fill the machine with one vector
    return lambda V: torch.stack([product(v) for v in V.T], 1)


def _rows_per_pass(features: FeatureRows) -> int:
    """How many rows go through at once: no phi, but float64."""
    return rows_within(features.memory // 8, 4 * Network.bytes_per_row(features.jacobian), at_most=8192)


def _from_phi(features: FeatureRows, V: Tensor) -> Tensor:
    """phi^T (phi V) for V (D, m)."""
    found = torch.zeros_like(V, memory_format=torch.contiguous_format)
    for _, phi in features.chunks("products"):
        P = phi.flatten(0, 1).double()  # (n O, D)
        found.addmm_(P.T, P @ V)
    return found


def _trusted(features: FeatureRows) -> bool:
    """Whether the product of a few rows is the one that phi gives."""
    generator = torch.Generator().manual_seed(0)
    rows = features.sample(_PROBE_ROWS)
    v = torch.randn(features.size, generator=generator, dtype=torch.float64).to(rows.device)
    P = features.jacobian(rows)[1].flatten(0, 1).double()
    expected = P.T @ (P @ v)
    try:
        found = _product(features.jacobian, rows, v)
    except Exception:
        return False
    return bool((found - expected).abs().amax() <= _AGREEMENT * expected.abs().amax())


def _product(jacobian: Jacobian, x: Tensor, v: Tensor) -> Tensor:
    """phi^T (phi v) of some rows, (D,)."""
    return -_residual_product(jacobian, x, v, 0.0)[1]


def _residual_product(jacobian: Jacobian, x: Tensor, v: Tensor, e: Tensor | float) -> tuple[Tensor, Tensor]:
    """u = e - phi v of some rows (n, O), and phi^T u (D,)."""
    with jacobian.borrowed() as model:
        tensors = {**parameters_by_name(model), **dict(model.named_buffers())}
        fixed = {name: _double(t.detach()) for name, t in tensors.items()}
        theta = {name: fixed.pop(name) for name in jacobian.parameters}
        x = _double(normal(x))

        def f(theta: dict[str, Tensor]) -> Tensor:
            return as_rows(functional_call(model, {**fixed, **theta}, (x,)), len(x))

        parts = torch.split(v, [t.numel() for t in theta.values()])
        tangent = {name: part.view_as(t) for (name, t), part in zip(theta.items(), parts, strict=True)}
        left = e - jvp(f, (theta,), (tangent,))[1]
        (gradient,) = vjp(f, theta)[1](left)
    return left, torch.cat([gradient[name].flatten() for name in theta])


def _double(t: Tensor) -> Tensor:
    return t.double() if t.is_floating_point() else t
