"""What predictors share that try candidate labels one by one: the grid, its sets, and warnings about it."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from fractions import Fraction

import torch
from torch import Tensor

from fullcp.candidates import accepted, hulls, or_the_best, p_values, runs
from fullcp.inputs import read_levels
from fullcp.predictors.base import Batch, Predictor
from fullcp.predictors.result import PredictionIntervals
from fullcp.regions import Interval


class CandidateGridWarning(UserWarning):
    """The candidate labels do not reach far enough, or lie too far apart, for the sets asked for."""


class CandidatePredictor(Predictor):
    """Full conformal prediction by trying candidate labels.

    A method says in `_tails` how the N + 1 residuals compare when a label is added. It fills `grid_` before `_keep`.

    Attributes
    ----------
    grid_ : Tensor (K,)
        The candidate labels, float64 in order.
    """

    grid_: Tensor

    def predict_interval(
        self, X: object, confidence_level: object = 0.9, *, joint: str | None = None, scales: object = None
    ) -> PredictionIntervals:
        """Point predictions and intervals from the smallest to the largest accepted candidate.

        Parameters and shapes are those of all predictors. The ends are candidates: an interval is narrower than one
        from all labels would be, by less than two steps of the grid or by what lies beyond the grid. Where no
        candidate is accepted, the one with the largest p-value is both ends. Warnings tell of sets that the grid cuts
        off or is too coarse for.
        """
        result = super().predict_interval(X, confidence_level, joint=joint, scales=scales)
        self._warn_about_grid(torch.as_tensor(result.intervals), read_levels(confidence_level))
        return result

    def predict_set(
        self, X: object, confidence_level: object = 0.9, *, joint: str | None = None, scales: object = None
    ) -> list[list[Interval]]:
        """The prediction set of each row: runs of neighbouring accepted candidates, as (lower, upper) pairs in order.

        A run of one candidate is a pair of equal labels. Its convex hull is what `predict_interval` gives.
        """
        sets: list[list[Interval]] = super().predict_set(X, confidence_level, joint=joint, scales=scales)
        ends = torch.tensor([[[pieces[0][0]], [pieces[-1][1]]] for pieces in sets], dtype=torch.float64)
        self._warn_about_grid(ends, read_levels(confidence_level))
        return sets

    @abstractmethod
    def _tails(self, batch: Batch, labels: Tensor) -> Tensor:
        """How residuals compare when test point j has the label labels[j, k], (T, m, K): see `count_tails`.

        The labels of a test point are in order.
        """

    def _grid_tails(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Tails of the grid, (T, m, K), and the candidates relative to the predictions, (m, K)."""
        labels = self.grid_.expand(len(batch.f), -1)
        return self._tails(batch, labels), labels - batch.f

    def _ends(self, batch: Batch, levels: list[Fraction]) -> Tensor:
        tails, r = self._grid_tails(batch)
        members = [or_the_best(accepted(tails, self.n_rows_, level), tails, r) for level in levels]
        return torch.stack([hulls(self.grid_, member) for member in members], dim=2).unsqueeze(3)

    def _offsets(self, batch: Batch, levels: list[Fraction]) -> Tensor:
        return self._ends(batch, levels) - batch.f[:, None, None]

    def _pieces(self, batch: Batch, level: Fraction) -> list[list[list[Interval]]]:
        tails, r = self._grid_tails(batch)
        member = or_the_best(accepted(tails, self.n_rows_, level), tails, r)
        return [[runs(self.grid_, row)] for row in member.cpu()]

    def _p_values(self, batch: Batch, y: Tensor) -> Tensor:
        return p_values(self._tails(batch, y), self.n_rows_)

    def _warn_about_grid(self, ends: Tensor, levels: list[Fraction]) -> None:
        """Tell of sets (n, 2, L) that the grid cuts off, at the highest level, or is too coarse for, at the lowest."""
        lower, upper = ends[:, 0], ends[:, 1]
        first, last = self.grid_[0].item(), self.grid_[-1].item()
        high, low = levels.index(max(levels)), levels.index(min(levels))
        cut = ((lower == first) | (upper == last))[:, high]
        single = (lower == upper)[:, low]
        for which, level, what in (
            (cut, levels[high], "reach an end of the grid and may go on beyond it"),
            (single, levels[low], "hold a single candidate or none"),
        ):
            if which.any():
                warnings.warn(
                    f"{int(which.sum())} of {len(which)} sets {what} (confidence_level {float(level):.6g}, "
                    f"{len(self.grid_)} candidates from {first:.6g} to {last:.6g}): pass candidates over a wider "
                    "range, or more of them",
                    CandidateGridWarning,
                    stacklevel=3,
                )
