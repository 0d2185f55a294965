"""What training rows say about calibration rows: a fixed quadratic prior on the parameters (docs/informed_split.md).

The training rows T give H_T = sum_T phi phi^T + diag(l2) and g_T = l2 theta - Phi_T^T e_T, the gradient of their ridge
objective at the trained weights. With calibration rows C,

    H = H_T + sum_C phi phi^T,   Delta = H^-1 (Phi_C^T e_C - g_T)

are curvature and step of a ridge regression on C whose penalty is the quadratic prior with precision H_T and gradient
g_T. Where H_T is known by a root, psi = phi H_T^-1/2 makes that prior the plain penalty l2 = 1 on weights H_T^-1/2 g_T
from its centre, and every formula of an exact curvature holds as it is. Where the parameters are more than the training
rows, no root is formed: T and C are fitted together, which has the same H and Delta, and C alone is asked about.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fullcp.curvature import (
    Curvature,
    NotPositiveDefiniteError,
    WhiteningCurvature,
    expand_l2,
    fit_curvature,
    fit_whitened,
    form_for,
    last_rows,
    needs_all_rows,
    restore,
)
from fullcp.features import FeatureRows, Jacobian, WhitenedJacobian
from fullcp.predictors.linearised import LinearisedNetwork
from fullcp.refinement import refine, relative_shift
from fullcp.sources import Inputs, as_tensor, join

_PRIOR = "prior."


@dataclass(frozen=True)
class Calibration:
    """Calibration rows under a prior: all that an `Engine` takes, and where its centres have moved.

    Attributes
    ----------
    jacobian : what test points are looked at with.
    curvature : H, asked about calibration rows.
    features : the calibration rows.
    e : Tensor (N, O)
        Their residuals after the step.
    slack : Tensor (N, O, O)
    step : Tensor (D,)
        Delta, in the coordinates of `jacobian`.
    rows : those that the curvature needs, the calibration rows last.
    shift : how far the step moves their predictions, see `relative_shift`.
    prior : tensors of what the coordinates rest on.
    """

    jacobian: Jacobian
    curvature: Curvature
    features: FeatureRows
    e: Tensor
    slack: Tensor
    step: Tensor
    rows: FeatureRows
    shift: float
    prior: dict[str, Tensor] = field(default_factory=dict)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and facts for `restore`; training rows only where predictions need them."""
        tensors = {"x": as_tensor(self.rows.x), "e": self.e, "slack": self.slack, "step": self.step}
        facts = {"skip": self.rows.count - self.features.count, "shift": self.shift}
        return {**tensors, **self.prior, **self.curvature.state()}, facts

    @classmethod
    def restore(
        cls, model: nn.Module, network: dict[str, Any], state: dict[str, Tensor], facts: dict[str, Any], memory: int
    ) -> Calibration:
        """Bring back what `state` gave; `network` are the facts about the network."""
        jacobian = Jacobian(model, facts=network)
        prior = {name: value for name, value in state.items() if name.startswith(_PRIOR)}
        if prior:
            known = {name.removeprefix(_PRIOR): value for name, value in prior.items()}
            jacobian = WhitenedJacobian(jacobian, _standing(jacobian, known, state["x"], memory).whiten)
        rows = FeatureRows(jacobian, state["x"], memory=memory)
        features = FeatureRows(jacobian, state["x"][facts["skip"] :], memory=memory)
        own = {name: value for name, value in state.items() if name not in prior}
        curvature = last_rows(restore(rows, own), features, facts["skip"])
        known_rows = rows if needs_all_rows(curvature) else features
        e, slack, step = (state[name] for name in ("e", "slack", "step"))
        return cls(jacobian, curvature, features, e, slack, step, known_rows, facts["shift"], prior)


class Prior(Protocol):
    """What a fit to training rows leaves."""

    jacobian: Jacobian

    def calibrate(self, x: Inputs, y: Tensor, memory: int) -> Calibration:
        """Add calibration rows x (N, ...) with targets y (N, O)."""


def fit_prior(network: LinearisedNetwork) -> Prior:
    """The prior of training rows, in the form that suits the structure and the sizes."""
    features = network.features
    rows = features.count * features.outputs
    together = network.structure == "last_layer" or (
        network.structure == "full" and form_for(rows, features.size) == "dual"
    )
    return TrainingRows(network) if together else QuadraticPrior.fit(network)


class QuadraticPrior:
    """H_T by a root: the exact matrix, KFAC, diagonal or low rank; calibration rows are exact in any case.

    Parameters
    ----------
    jacobian : phi.
    curvature : H_T, which needs none of its rows any more.
    gradient : Tensor (D,)
        g_T.
    """

    def __init__(self, jacobian: Jacobian, curvature: WhiteningCurvature, gradient: Tensor):
        self.curvature = curvature
        self.jacobian: Jacobian = WhitenedJacobian(jacobian, curvature.whiten)
        self.weights = curvature.whiten(gradient.view(1, 1, -1)).view(-1)  # H_T^-1/2 g_T

    @classmethod
    def fit(cls, network: LinearisedNetwork) -> QuadraticPrior:
        """Curvature and gradient over the training rows, which are let go."""
        features, jacobian = network.features, network.jacobian
        if network.structure != "kfac":  # one pass over gradients is all that is to come there
            features.hold()
        fitted = fit_curvature(features, network.structure, network.l2, cross=False)
        state = fitted.state()
        gradient = state["l2"] * torch.cat([p.detach().flatten().double() for p in jacobian.parameters.values()])
        for rows, phi in features.chunks("gradient"):
            gradient -= torch.einsum("nod,no->d", phi.double(), network.e[rows])
        features.release()
        return cls(jacobian, _standing(jacobian, state, features.x[:0], features.memory), gradient)

    def calibrate(self, x: Inputs, y: Tensor, memory: int) -> Calibration:
        """Ridge regression on psi with l2 = 1."""
        features = FeatureRows(self.jacobian, x, memory=memory)
        before = y - features.predictions
        try:
            curvature = fit_whitened(features)
        except NotPositiveDefiniteError as error:
            raise NotPositiveDefiniteError(
                "X has rows so far from all that the training rows say that their leverages are lost to rounding in "
                "float64: fit with a larger l2"
            ) from error
        step, e = curvature.refine(before, self.weights)
        slack, shift = curvature.slack(), relative_shift(before, e)
        prior = {f"{_PRIOR}{name}": value for name, value in self.curvature.state().items()}
        return Calibration(self.jacobian, curvature, features, e, slack, step, features, shift, prior)


class TrainingRows:
    """The training rows themselves, to be fitted together with calibration rows."""

    def __init__(self, network: LinearisedNetwork):
        self.network, self.jacobian = network, network.jacobian
        network.features.release()
        expand_l2(
            network.l2, self.jacobian.parameters, torch.device("cpu")
        )  # a wrong one is refused before the second step

    def calibrate(self, x: Inputs, y: Tensor, memory: int) -> Calibration:
        """The exact curvature of all rows, asked about calibration rows."""
        known, skip = self.network, self.network.features.count
        rows = FeatureRows(self.jacobian, join(known.features.x, x), memory=memory)
        features = FeatureRows(self.jacobian, x, memory=memory)
        before = y - features.predictions
        fitted = fit_curvature(rows, known.structure, known.l2)
        step, refined = refine(fitted, self.jacobian, torch.cat([known.e, before]))
        e, slack = refined[skip:].clone(), fitted.slack()[skip:].clone()
        curvature = last_rows(fitted, features, skip)
        needed = rows if needs_all_rows(curvature) else features
        return Calibration(self.jacobian, curvature, features, e, slack, step, needed, relative_shift(before, e))


def _standing(jacobian: Jacobian, state: dict[str, Tensor], x: Tensor, memory: int) -> WhiteningCurvature:
    """H_T without the rows it was made of."""
    return restore(FeatureRows(jacobian, x[:0], memory=memory), state)  # type: ignore[return-value]
