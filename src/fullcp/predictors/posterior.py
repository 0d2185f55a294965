"""The predictive spread sqrt(1 + h) of a network about its training rows, shared by SCP-GN and LA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fullcp.curvature import Curvature, fit_curvature, restore
from fullcp.features import FeatureRows, Jacobian
from fullcp.inputs import Rows, check_all_finite
from fullcp.predictors.fingerprint import Fingerprint
from fullcp.predictors.linearised import LinearisedNetwork
from fullcp.sources import as_tensor
from fullcp.tuning import Tuning


@dataclass(frozen=True)
class Posterior:
    """Curvature over training rows, asked only for leverages of new points."""

    jacobian: Jacobian
    features: FeatureRows
    curvature: Curvature
    fingerprint: Fingerprint
    tuning: Tuning | None = None
    error: float = float("nan")
    """Root mean square of the training residuals."""
    choice: str = ""
    """Which structure serves, and why."""

    @classmethod
    def fit(
        cls, model: nn.Module, rows: Rows, curvature: str, l2: object, memory: int, parameters: object = None
    ) -> Posterior:
        """Fit the curvature to training rows; their targets matter for tuning and `error`."""
        network = LinearisedNetwork.about(model, rows, curvature, l2, memory, parameters)
        features = network.features
        fitted = fit_curvature(features, network.structure, network.l2, cross=False)
        error = float(network.e.square().mean().sqrt())
        return cls(network.jacobian, features, fitted, Fingerprint(model), network.tuning, error, network.why)

    def covariance(self, phi: Tensor) -> Tensor:
        """I + V of test points phi (m, O, D), (m, O, O): the predictive covariance in units of the noise."""
        V = self.curvature.leverage(phi)
        check_all_finite(None, {"leverages": V})
        return V + torch.eye(V.shape[1], dtype=V.dtype, device=V.device)

    def spread(self, phi: Tensor) -> Tensor:
        """sqrt(1 + V_oo), (m, O)."""
        return self.covariance(phi).diagonal(dim1=1, dim2=2).sqrt()

    def state(self) -> dict[str, Tensor]:
        """Tensors for `restore`; the training rows only where the leverages need them."""
        rows = {} if self.curvature.stands_alone else {"x": as_tensor(self.features.x)}
        return {**rows, **self.curvature.state()}

    @classmethod
    def restore(cls, model: nn.Module, facts: dict[str, Any], memory: int, state: dict[str, Tensor]) -> Posterior:
        """Bring back what `state` gave; `facts` are those about the network."""
        jacobian = Jacobian(model, facts=facts)
        rows = state.get("x", torch.empty(0, *jacobian.row_shape, device=state["l2"].device))
        features = FeatureRows(jacobian, rows, memory=memory)
        return cls(jacobian, features, restore(features, state), Fingerprint(model))
