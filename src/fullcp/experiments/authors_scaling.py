"""The authors' scaling mistake, made on purpose: to see which of the paper's figures it explains.

Their code standardises the rows that train a network with the statistics of these rows, but calibration and test rows
with those of 90 per cent of them only. Unseen rows are then a little off, inputs and targets, as no real ones are. What
is learned from unseen rows (split conformal widths) makes up for it by wider intervals; what is not loses coverage.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fullcp.data import Standardizer, Table
from fullcp.experiments.protocol import Array, Fold, Rows, ScaledFold

SCALINGS = ("training", "authors")
_KNOWN_SHARE = 0.9
_SEED = 7


@dataclass(frozen=True)
class MisscaledFold(ScaledFold):
    """A fold whose unseen rows are off as the authors' are; the networks are the same."""

    table: Table

    @classmethod
    def of(cls, table: Table, fold: Fold) -> MisscaledFold:
        """The fold, and the table as it was."""
        right = ScaledFold.of(table, fold)
        return cls(fold, right.X, right.y, right.scale, table)

    def unseen(self, which: Rows, share: int) -> tuple[Array, Array]:
        """Unseen rows in the network's units after the authors' detour.

        Our networks have the units of the whole training part, theirs those of the rows they are trained on. So rows
        are scaled by statistics of 90 per cent of these rows, and brought back as if by those of all of them.
        """
        own = self.fold.parts(share)[0] if share else self.fold.train
        known = np.random.default_rng([_SEED, self.fold.number]).permutation(own)[: round(_KNOWN_SHARE * len(own))]

        def detour(values: Array) -> Array:
            scaled = Standardizer.of(values[known]).transform(values[which])
            return Standardizer.of(values[self.fold.train]).transform(Standardizer.of(values[own]).inverse(scaled))

        return detour(self.table.X), detour(self.table.y)


def scaled_fold(table: Table, fold: Fold, scaling: str) -> ScaledFold:
    """A fold as `scaling`, "training" (by all rows of the training part) or "authors", has it."""
    return (MisscaledFold if scaling == "authors" else ScaledFold).of(table, fold)
