"""A network linearised about its training rows: which structure serves, their gradients and residuals, and l2."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from fullcp.curvature import choose
from fullcp.features import FeatureRows, Jacobian, select_parameters
from fullcp.inputs import Rows, check_outputs
from fullcp.predictors.units import warn_if_poor
from fullcp.tuning import Tuning, settle


@dataclass(frozen=True)
class LinearisedNetwork:
    """What comes before the fit of a curvature to training rows.

    Attributes
    ----------
    structure : of the curvature, "auto" settled.
    why : it is that, in words.
    features : gradients of the rows.
    e : Tensor (N, O)
        Their residuals.
    l2 : the penalty, as given or tuned.
    tuning : how it was tuned; None where it was given.
    """

    structure: str
    why: str
    features: FeatureRows
    e: Tensor
    l2: object
    tuning: Tuning | None

    @classmethod
    def about(
        cls, model: nn.Module, rows: Rows, curvature: str, l2: object, memory: int, parameters: object = None
    ) -> LinearisedNetwork:
        """Choose the structure, look at the rows, and tune l2 where that is asked for."""
        choice = choose(curvature, model, rows.x, only=select_parameters(model, parameters), memory=memory)
        assert rows.y is not None
        check_outputs(choice.jacobian.outputs, rows.y)
        features = FeatureRows(choice.jacobian, rows.x, memory=memory)
        e = rows.y - features.predictions
        warn_if_poor(e, rows.y)
        l2, tuning = settle(l2, features, e, choice.structure)
        return cls(choice.structure, f"{choice.structure}: {choice.why}", features, e, l2, tuning)

    @property
    def jacobian(self) -> Jacobian:
        """phi."""
        return self.features.jacobian
