"""CV+: cross-validated conformal prediction with K networks trained as one ensemble."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import Self

from fullcp.curvature import check_structure, look_at, points_within
from fullcp.features import Network
from fullcp.features.network import normal
from fullcp.features.preserve import unwrap
from fullcp.inputs import Rows, check_all_finite, check_positive_int
from fullcp.leave_one_out import joint_sizes, plus_intervals, plus_p_values
from fullcp.memory import rows_within
from fullcp.predictors.base import DEFAULT_MEMORY, Batch
from fullcp.predictors.jackknife import PlusPredictor
from fullcp.predictors.learned import predict_rows
from fullcp.predictors.posterior import Posterior
from fullcp.predictors.retraining import fresh
from fullcp.training.trainer import run_all


@dataclass(frozen=True)
class _Fold:
    """The network that did not see some of the rows, and the spread about those it saw, where widths follow it."""

    network: Network
    posterior: Posterior | None

    def look(self, x: Tensor, budget: int) -> tuple[Tensor, Tensor]:
        """Predictions and spreads of points x (m, ...), (m, O) each."""
        if self.posterior is None:
            f = predict_rows(self.network, x, budget)
            return f, torch.ones_like(f)
        size = points_within(self.posterior.curvature, self.posterior.jacobian, budget)
        parts = []
        for start in range(0, len(x), size):
            f, phi = look_at(self.posterior.curvature, self.posterior.jacobian, x[start : start + size])
            check_all_finite(start, {"outputs": f, "gradients": phi})
            parts.append((f.double(), self.posterior.spread(phi)))
        f, spread = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        return f, spread


class CVPlusRegressor(PlusPredictor):
    """CV+: each row's residual is that of a network which did not see it; K networks are trained, as one ensemble.

    The honest comparison for `JackknifePlusRegressor`, with real trainings in place of Gauss-Newton steps. With n rows
    in K folds coverage is 1 - 2 alpha - min{2 (1 - 1/K) / (n/K + 1), (1 - K/n) / (K + 1)} at least (Barber et al.,
    2021), whatever the network, and in practice a little above 1 - alpha: the networks see fewer rows than `model`.
    Each output is a problem of its own.

    Parameters
    ----------
    model : torch.nn.Module
        The network trained on all rows, (n, ...) -> (n,) or (n, O). It is never changed. It gives the point prediction,
        and says what networks to train, from fresh weights.
    folds : int
        K.
    normalized : bool
        Divide residuals by sqrt(1 + h(x)), with the leverage h by the Gauss-Newton curvature of the rows that the
        fold's network saw.
    curvature : "auto", "full", "kfac", "last_layer", "diagonal", "low_rank" or "low_rank:200"
        Of that leverage, see `FullConformalRegressor`.
    l2 : "marglik", float, or array of one value per parameter tensor or per parameter
        The ridge penalty in sum scale, of the trainings and of the leverage. "marglik" tunes it in each fold while its
        network trains. It costs nothing, since a fold's network is tuned on the rows it sees.
    epochs, batch_size, learning_rate, seed
        As in `fullcp.training.train`. The seed is that of the folds and of the first weights, too.
    memory : str or int
        Working memory, such as "2GB".

    Attributes
    ----------
    models_ : the K networks.
    trainings_ : how their trainings went; None in a predictor that was loaded.
    folds_ : the fold of each row (N,), as NumPy.
    n_rows_ : number of rows.

    Notes
    -----
    An interval need not hold the prediction, and levels below 0.5 are refused: their intervals can be empty.

    Examples
    --------
    >>> import torch, fullcp
    >>> _ = torch.manual_seed(0)
    >>> X, y = torch.randn(60, 3), torch.randn(60)
    >>> cp = fullcp.CVPlusRegressor(torch.nn.Linear(3, 1), folds=5, epochs=20).conformalize(X, y)
    >>> cp.predict_interval(X[:2]).intervals.shape
    torch.Size([2, 2, 1])
    """

    def __init__(
        self,
        model: nn.Module,
        folds: int = 10,
        normalized: bool = True,
        curvature: str = "auto",
        *,
        l2: Any = 1.0,
        epochs: int = 1000,
        batch_size: int = 256,
        learning_rate: tuple[float, float] = (1e-2, 1e-5),
        seed: int = 0,
        memory: str | int = DEFAULT_MEMORY,
    ):
        self.model = model
        self.folds = folds
        self.normalized = normalized
        self.curvature = curvature
        self.l2 = l2
        self.epochs = epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.seed = seed
        self.memory = memory

    def conformalize(self, X: object, y: object = None) -> Self:
        """Train the K networks and compute each row's residual by the one that did not see it.

        Parameters
        ----------
        X : array, tensor or frame (N, ...), or a DataLoader of (inputs, targets)
        y : (N,) or (N, O); left out with a DataLoader
        """
        check_structure(self.curvature)
        check_positive_int("folds", self.folds, least=2)
        check_positive_int("seed", self.seed, least=0)
        if not isinstance(self.normalized, bool):
            raise TypeError(f"normalized must be True or False, got {self.normalized!r}")
        rows = self._read_data(X, y)
        if self.folds > len(rows.x) // 2:
            raise ValueError(f"folds must leave two rows in each, got folds={self.folds} for {len(rows.x)} rows")
        network = Network(self.model, rows.x)
        y_checked = self._check_targets(network, rows)
        place = np.random.default_rng(self.seed).permutation(len(rows.x)) % self.folds
        fold = torch.from_numpy(place).to(y_checked.device)
        folds, trainings = self._train(rows, y_checked, fold)
        scores = torch.empty_like(y_checked)
        for k, found in enumerate(folds):
            held = fold == k
            f, spread = found.look(rows.tensor()[held], self._budget() // 8)
            scores[held] = (y_checked[held] - f).abs() / spread
        self._take(folds, scores, fold)
        self.trainings_: list[Any] | None = trainings
        self._keep(network, len(rows.x), rows.columns)
        return self

    def _train(self, rows: Rows, y: Tensor, fold: Tensor) -> tuple[list[_Fold], list[Any]]:
        """The networks of all folds."""
        with torch.inference_mode(False), torch.enable_grad():  # what is made in inference mode cannot be trained
            x, y = normal(rows.tensor()), normal(y)
            dtype = next(self.model.parameters()).dtype
            models = [fresh(unwrap(self.model), self.seed + k) for k in range(self.folds)]
            seen = [fold != k for k in range(self.folds)]
            trainings = run_all(
                models,
                [(x[keep], y[keep].to(dtype)) for keep in seen],
                l2=[self.l2] * self.folds,
                epochs=self.epochs,
                batch_size=self.batch_size,
                learning_rate=self.learning_rate,
                seed=[self.seed + k for k in range(self.folds)],
            )
            lost = [k for k, training in enumerate(trainings) if training.divergence is not None]
            if lost:
                raise ValueError(
                    f"training diverged in fold {lost[0]}: {trainings[lost[0]].divergence}; a smaller learning_rate "
                    "helps, or standardised data"
                )
            posteriors: list[Posterior | None] = [None] * self.folds
            if self.normalized:
                parts = zip(models, seen, trainings, strict=True)
                posteriors = [
                    self._posterior(m, replace(rows, x=x[keep], y=y[keep]), training.l2) for m, keep, training in parts
                ]
            pairs = zip(models, posteriors, strict=True)
            return [_Fold(p.jacobian if p else Network(m, x), p) for m, p in pairs], trainings

    def _posterior(self, model: nn.Module, rows: Rows, l2: object) -> Posterior:
        return Posterior.fit(model, rows, self.curvature, l2, self._budget())

    def _take(self, folds: list[_Fold], scores: Tensor, fold: Tensor) -> None:
        self._folds, self._scores, self._fold = folds, scores, fold
        self.models_ = [found.network.model for found in folds]
        self.folds_ = fold.cpu().numpy()

    def _needs_gradients(self) -> bool:
        return False

    def _ends_of(self, batch: Batch, scores: Tensor) -> tuple[Tensor, Tensor]:
        """What each row's network has for its ends, relative to the predictions, for scores (N, O): (O, m, N) each."""
        m, (N, O) = len(batch.f), scores.shape
        lower = batch.f.new_empty(O, m, N)
        upper = torch.empty_like(lower)
        for k, found in enumerate(self._folds):
            held = self._fold == k
            f, spread = found.look(batch.x, self._budget() // 8)
            centre = (f - batch.f).T.unsqueeze(2)  # (O, m, 1)
            width = spread.T.unsqueeze(2) * scores[held].T.unsqueeze(1)
            lower[:, :, held], upper[:, :, held] = centre - width, centre + width
        return lower, upper

    def _parts(self, batch: Batch) -> list[slice]:
        """Points of a batch whose ends fit into memory."""
        N, O = self._scores.shape
        size = rows_within(self._budget() // 4, 6 * 8 * N * O, at_most=4096)
        return [slice(start, start + size) for start in range(0, len(batch.f), size)]

    def _offsets(self, batch: Batch, levels: list[Fraction]) -> Tensor:
        return self._intervals(batch, levels, self._scores)

    def _p_values(self, batch: Batch, y: Tensor) -> Tensor:
        return self._p_values_by(batch, y, self._scores)

    def _rectangles(self, batch: Batch, levels: list[Fraction], scales: Tensor) -> Tensor:
        return self._intervals(batch, levels, joint_sizes(self._scores, scales))

    def _rectangle_p_values(self, batch: Batch, y: Tensor, scales: Tensor) -> Tensor:
        return self._p_values_by(batch, y, joint_sizes(self._scores, scales)).amin(1, keepdim=True)

    def _intervals(self, batch: Batch, levels: list[Fraction], scores: Tensor) -> Tensor:
        parts = []
        for at in self._parts(batch):
            ends = zip(*self._ends_of(_cut(batch, at), scores), strict=True)
            parts.append(torch.stack([plus_intervals(low, up, levels) for low, up in ends], dim=3))
        return torch.cat(parts)

    def _p_values_by(self, batch: Batch, y: Tensor, scores: Tensor) -> Tensor:
        parts = []
        for at in self._parts(batch):
            part = _cut(batch, at)
            columns = zip(*self._ends_of(part, scores), part.f.T, y[at].T, strict=True)
            parts.append(torch.stack([plus_p_values(*column) for column in columns], dim=1))
        return torch.cat(parts)

    def _state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors: dict[str, Tensor] = {"scores": self._scores, "fold": self._fold}
        for k, found in enumerate(self._folds):
            tensors |= {f"fold.{k}.weights.{name}": value for name, value in found.network.model.state_dict().items()}
            if found.posterior is not None:
                tensors |= {f"fold.{k}.posterior.{name}": value for name, value in found.posterior.state().items()}
        normalized = self._folds[0].posterior is not None
        return tensors, {"networks": [found.network.facts() for found in self._folds], "normalized": normalized}

    def _restore(self, network: dict[str, Any], state: dict[str, Tensor], facts: dict[str, Any]) -> Network:
        folds = []
        for k, known in enumerate(facts["networks"]):
            model = copy.deepcopy(unwrap(self.model))
            model.load_state_dict(_under(state, f"fold.{k}.weights."))
            posterior = None
            if facts["normalized"]:
                found = _under(state, f"fold.{k}.posterior.")
                posterior = Posterior.restore(model, known, self._budget(), found)
            folds.append(_Fold(posterior.jacobian if posterior else Network(model, facts=known), posterior))
        self._take(folds, state["scores"], state["fold"])
        self.trainings_ = None
        return Network(self.model, facts=network)


def _cut(batch: Batch, at: slice) -> Batch:
    return Batch(batch.x[at], batch.f[at], None, batch.output[at])


def _under(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
