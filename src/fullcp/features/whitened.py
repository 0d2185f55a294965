"""phi in other coordinates: gradients after a linear map of the parameters."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fullcp.features.jacobian import Jacobian


class WhitenedJacobian(Jacobian):
    """Gradients in coordinates in which some matrix P (D, D) is the identity: psi = phi P^-1/2, in float64.

    Parameters
    ----------
    jacobian : phi
    whiten : takes phi (n, O, D), gives psi (n, O, D), with any root of P: psi psi^T = phi P^-1 phi^T.
    """

    def __init__(self, jacobian: Jacobian, whiten: Callable[[Tensor], Tensor]):
        super().__init__(jacobian.model, facts=jacobian.facts())
        self._whiten = whiten

    @property
    def dtype(self) -> torch.dtype:
        """Of psi."""
        return torch.float64

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs f (n, O) and psi (n, O, D) of the rows x (n, ...)."""
        f, phi = super().__call__(x)
        return f, self._whiten(phi)

    def bytes_per_row(self) -> int:
        """Memory of one row: that of phi, and psi with what it is put together from."""
        return super().bytes_per_row() + 3 * 8 * self.outputs * self.size
