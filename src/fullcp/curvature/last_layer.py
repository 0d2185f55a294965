"""The exact curvature of the last layer's parameters alone: a linear model on what goes into that layer.

phi = I_O (x) [z, 1] there, so that H = I_O (x) H_1 with H_1 = sum_i [z_i, 1] [z_i, 1]^T + diag(l2) of p + 1 rows, and
V = h I_O, C = c I_O: one factorisation serves all outputs, and each is the case of one output.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fullcp.curvature.base import EVERY, Curvature, Query
from fullcp.curvature.eigen import expand_over
from fullcp.curvature.full import factorise, restore_full
from fullcp.features import FeatureRows, RowIndex
from fullcp.features.penultimate import Penultimate

NAME = "last_layer"


def fit_last_layer(features: FeatureRows, l2: object, *, cross: bool = True, form: str | None = None) -> Curvature:
    """H of the last layer over the rows of `features`, whose gradients are in its parameters alone.

    Parameters
    ----------
    features : see `fullcp.curvature.jacobian_for`.
    l2 : the ridge penalty of the last layer, the same for all outputs.
    cross, form : see `fullcp.curvature.full.fit_full`.
    """
    diagonal = expand_over(features, l2)
    rows = features.kept.pop(NAME, None) or penultimate_rows(features)
    each = _layout(rows).part(diagonal)  # (O, p + 1)
    if (each != each[0]).any():
        raise ValueError("l2 must be the same for all outputs with curvature='last_layer': give one value a tensor")
    return LastLayerCurvature(rows, factorise(rows, each[0], cross=cross, form=form), diagonal)


def penultimate_rows(features: FeatureRows) -> FeatureRows:
    """[z, 1] of the training rows, (N, 1, p + 1), as gradients of one output."""
    return FeatureRows(Penultimate(features.jacobian), features.x, memory=features.memory)


def last_layer_gram(features: FeatureRows) -> tuple[Tensor, int]:
    """sum_i [z_i, 1] [z_i, 1]^T (p + 1, p + 1) before l2 is known, and how many outputs share it.

    The next fit to the same `features` takes it up.
    """
    rows = features.kept[NAME] = penultimate_rows(features)
    return rows.gram(keep=True).clone(), _layout(rows).copies


def restore_last_layer(features: FeatureRows, state: dict[str, Tensor]) -> Curvature:
    """The structure whose `state()` was saved, over the same rows."""
    rows = penultimate_rows(features)
    inner = {key.removeprefix("last_layer."): value for key, value in state.items() if key.startswith("last_layer.")}
    return LastLayerCurvature(rows, restore_full(rows, inner), state["l2"])


def _layout(rows: FeatureRows) -> Penultimate:
    assert isinstance(rows.jacobian, Penultimate)
    return rows.jacobian


class LastLayerCurvature:
    """H = I_O (x) H_1, from the curvature of one output.

    Parameters
    ----------
    rows : [z, 1] of the training rows.
    single : H_1.
    diagonal : Tensor (D,)
        The penalty of all outputs.
    """

    def __init__(self, rows: FeatureRows, single: Curvature, diagonal: Tensor):
        self.single, self.diagonal, self.layout = single, diagonal, _layout(rows)
        self.name = single.name.replace("full", "last layer")
        self.stands_alone, self.selective, self.independent = single.stands_alone, single.selective, True
        self.eye = torch.eye(self.layout.copies, dtype=torch.float64, device=rows.x.device)

    def slack(self) -> Tensor:
        """I - V_i = (1 - h_i) I, (N, O, O)."""
        return self.single.slack() * self.eye

    def leverage(self, phi: Tensor) -> Tensor:
        """V = h I of test points (m, O, D): (m, O, O)."""
        return self.single.leverage(self._first(phi)) * self.eye

    def query(self, phi: Tensor) -> Query:
        """Leverages and cross leverages of test points (m, O, D), multiples of I."""
        query = self.single.query(self._first(phi))

        def cross(rows: RowIndex, points: RowIndex = EVERY) -> Tensor:
            return query.cross(rows, points) * self.eye

        return Query(query.leverage * self.eye, cross, query)

    def solve(self, vectors: Tensor) -> Tensor:
        """H^-1 times vectors (D,) or (D, m)."""
        columns = vectors.reshape(len(self.diagonal), -1)
        each = self.layout.part(columns.T)  # (m, O, p + 1)
        solved = self.single.solve(each.flatten(0, 1).T).T.view_as(each)
        return self.layout.join(solved).T.reshape(vectors.shape)

    def refine(self, e: Tensor, weights: Tensor, *, exactly: bool = True) -> tuple[Tensor, Tensor]:
        """The step to the ridge solution and the residuals there, output by output."""
        pairs = zip(e.unbind(1), self.layout.part(weights), strict=True)
        done = [self.single.refine(eo.unsqueeze(1), theta, exactly=exactly) for eo, theta in pairs]
        steps, refined = zip(*done, strict=True)
        return self.layout.join(torch.stack(steps)), torch.cat(refined, 1)

    def state(self) -> dict[str, Tensor]:
        """The factor of one output and the penalty of all."""
        return {**{f"last_layer.{key}": value for key, value in self.single.state().items()}, "l2": self.diagonal}

    def _first(self, phi: Tensor) -> Tensor:
        """[z, 1] of test points (m, O, D): (m, 1, p + 1)."""
        return self.layout.part(phi[:, 0])[:, :1]
