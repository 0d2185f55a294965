"""CQR: split conformal prediction around the quantiles that a network has learned (Romano, Patterson, Candes 2019)."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Self

from fullcp.features import Network
from fullcp.inputs import ModelTraits, Rows, model_traits, read_levels
from fullcp.predictors.base import DEFAULT_MEMORY, Batch, NotFittedError, Predictor, kept_setting
from fullcp.predictors.learned import RECIPE, LearnedNetwork
from fullcp.regions import Interval, absolute_rank, order_statistics, rows_needed
from fullcp.training import PinballLoss

_SETTINGS = ("confidence_level", *RECIPE)


class ConformalizedQuantileRegressor(Predictor):
    """Split conformal prediction around learned quantiles: widths follow the noise, each end for itself (CQR).

    One network learns, for each level 1 - alpha, the quantiles alpha / 2 and 1 - alpha / 2 of y, by the mean pinball
    loss. The score of a label is its distance from between them, max(q_lo - y, y - q_hi), negative inside; calibration
    moves both ends by the same conformal quantile of the scores. Coverage is guaranteed whatever the network has
    learned: the calibration rows must have had no part in training it.

    Parameters
    ----------
    model : torch.nn.Module, optional
        A network with two outputs a level: the quantiles of y from the lowest to the highest. Not a predictor of y: it
        is the pattern for a network that `fit` trains, a copy, from the weights it has and only where they have
        requires_grad. None makes the paper's network, for rows that are flat.
    confidence_level : float or sequence of L floats in (0, 1)
        The levels to train for. Predictions can be asked for at these, no others.
    l2, epochs, batch_size, learning_rate, seed
        How the network is trained: as in `fullcp.training.train`, l2 against the sum of pinball losses (of standardised
        targets about a tenth of squared ones, hence the small value). The seed is that of the first weights, too. With
        ``epochs=0`` `model` is taken as it is, trained already.
    memory : str or int
        Working memory, such as "2GB".

    Attributes
    ----------
    quantile_model_ : the trained network.
    training_ : how its training went; None in a predictor that was loaded.
    n_rows_ : number of calibration rows.

    Notes
    -----
    The point prediction is the middle of the two innermost quantiles, no mean and no median.

    Quantiles that cross are put in order, before the scores, at calibration and test points alike. Three more things
    make an interval larger, so that none lowers its coverage: what remains of nothing, where a negative conformal
    quantile takes more than there is, is the point prediction; an interval always reaches to it; and it holds the
    intervals of the lower levels trained for (they nest by themselves wherever conformal quantiles do not vary much).
    With a single level only the first can happen.

    Each level has scores of its own, so that p-values are coarse: the smallest alpha trained for at which the label is
    rejected, 1 where none rejects it. It exceeds alpha where the label lies in the set of level 1 - alpha, and is
    valid: at most u with probability at most u.

    Examples
    --------
    >>> import torch, fullcp
    >>> _ = torch.manual_seed(0)
    >>> X, y = torch.randn(100, 3), torch.randn(100)
    >>> cp = fullcp.ConformalizedQuantileRegressor(confidence_level=[0.8, 0.9], epochs=20)
    >>> cp = cp.fit(X[:50], y[:50]).conformalize(X[50:], y[50:])
    >>> cp.predict_interval(X[:2], [0.8, 0.9]).intervals.shape
    torch.Size([2, 2, 2])
    """

    _first_step: ClassVar[str] = "fit(X_train, y_train).conformalize"

    def __init__(
        self,
        model: nn.Module | None = None,
        confidence_level: Any = (0.9, 0.95, 0.99),
        *,
        l2: Any = 0.01,
        epochs: int = 1000,
        batch_size: int = 256,
        learning_rate: tuple[float, float] = (1e-2, 1e-5),
        seed: int = 0,
        memory: str | int = DEFAULT_MEMORY,
    ):
        self.model = model  # type: ignore[assignment]
        self.confidence_level = confidence_level
        self.l2 = l2
        self.epochs = epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.seed = seed
        self.memory = memory

    def fit(self, X: object, y: object = None) -> Self:
        """Train the network of quantiles.

        Parameters
        ----------
        X : array, tensor or frame (N, ...), or a DataLoader of (inputs, targets)
        y : (N,); left out with a DataLoader
        """
        levels = sorted(set(read_levels(self.confidence_level)))
        traits = self._pattern_traits(X)
        rows = self._read_data(X, y, traits=traits)
        learned = LearnedNetwork.train(
            "model",
            self.model,
            rows,
            _single(rows),
            2 * len(levels),
            traits,
            loss=PinballLoss([float(tau) for tau in quantiles_of(levels)]),
            **{name: getattr(self, name) for name in RECIPE},
        )
        if hasattr(self, "network_"):
            del self.network_  # calibration on other quantiles holds no longer
        self._take(learned, levels)
        return self

    def conformalize(self, X: object, y: object = None) -> Self:
        """Compute the scores of calibration rows.

        Parameters
        ----------
        X : array, tensor or frame (N, ...), or a DataLoader of (inputs, targets)
            Rows that the network has not seen.
        y : (N,); left out with a DataLoader
        """
        if not hasattr(self, "_learned"):
            raise NotFittedError(f"{type(self).__name__}: call fit(X_train, y_train) before conformalize")
        if not self._learned.fingerprint.matches(self._learned.model):
            raise NotFittedError(f"{type(self).__name__}: quantile_model_ has changed since fit; call fit again")
        rows = self._read_data(X, y)
        self._learned.check_rows(rows)
        low, high = in_order(self._learned.predict(rows.x, self._budget() // 8))
        y = _single(rows)
        self._q = conformal_quantiles(torch.maximum(low - y, y - high), self._levels)
        self._keep(self._learned.network, len(rows.x), rows.columns)
        return self

    @classmethod
    def load(cls, path: str | Path, model: nn.Module | None = None) -> Self:
        """Read what `save` wrote, which holds the weights.

        Where you gave a network, give `model` with the same layers again, whatever its weights. Without one, the
        library's own network is loaded to the CPU.
        """
        return cls._load(path, {"model": model})

    def _pattern_traits(self, X: object) -> ModelTraits:
        """Where the network will live: with the pattern, or with the rows that are to train it."""
        if self.model is not None:
            return model_traits(self.model)
        return ModelTraits(X.device if isinstance(X, Tensor) else torch.device("cpu"), torch.get_default_dtype())

    def _take(self, learned: LearnedNetwork, levels: list[Fraction]) -> None:
        """Keep what was fitted."""
        self._learned, self._levels = learned, levels
        self._fit_settings = {name: kept_setting(getattr(self, name)) for name in _SETTINGS}
        self.quantile_model_, self.training_ = learned.model, learned.training

    def _earlier_settings(self) -> dict[str, Any]:
        return self._fit_settings

    def _predicting(self) -> nn.Module:
        return self._learned.model

    def _outputs(self) -> int:
        return 1

    def _needs_gradients(self) -> bool:
        return False

    def _center(self, f: Tensor, phi: Tensor | None) -> Tensor:
        low, high = in_order(f)
        return (low[:, :1] + high[:, :1]) / 2

    def _joint_levels(self, levels: list[Fraction], joint: str | None) -> list[Fraction]:
        super()._joint_levels(levels, joint)
        unknown = [f"{float(level):.6g}" for level in levels if level not in self._levels]
        if unknown:
            raise ValueError(
                f"confidence_level {', '.join(unknown)} was not trained for, only "
                f"{', '.join(f'{float(level):.6g}' for level in self._levels)}: these stand in the constructor, fit "
                "trains for them"
            )
        return levels

    def _ends(self, batch: Batch, levels: list[Fraction]) -> Tensor:
        ends = nested_ends(*in_order(batch.output), batch.f, self._q)
        return ends[:, :, [self._levels.index(level) for level in levels], None]

    def _offsets(self, batch: Batch, levels: list[Fraction]) -> Tensor:
        return self._ends(batch, levels) - batch.f[:, None, None]

    def _pieces(self, batch: Batch, level: Fraction) -> list[list[list[Interval]]]:
        return [[[(low, high)]] for low, high in self._ends(batch, [level])[:, :, 0, 0].tolist()]

    def _p_values(self, batch: Batch, y: Tensor) -> Tensor:
        lower, upper = self._ends(batch, self._levels)[..., 0].unbind(1)
        alphas = torch.tensor([float(1 - level) for level in self._levels], dtype=y.dtype, device=y.device)
        return torch.where((y < lower) | (y > upper), alphas, 1.0).amin(1, keepdim=True)

    def _rows_needed(self, level: Fraction) -> int:
        return rows_needed(level, "absolute")

    def _recognise(self, digest: str) -> None:
        """Any network of the same layers will do: the weights come from the file."""

    def _state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, about = self._learned.state()
        return {"q": self._q, **tensors}, {"learned": about}

    def _restore(self, network: dict[str, Any], state: dict[str, Tensor], facts: dict[str, Any]) -> Network:
        self._q = state["q"]
        learned = LearnedNetwork.restore("model", self.model, self._q.device, state, facts["learned"])
        self._take(learned, sorted(set(read_levels(self.confidence_level))))
        return learned.network


def quantiles_of(levels: list[Fraction]) -> list[Fraction]:
    """alpha / 2 and 1 - alpha / 2 for each level in ascending order, from the lowest to the highest.

    Examples
    --------
    >>> [float(tau) for tau in quantiles_of([Fraction(8, 10), Fraction(9, 10)])]
    [0.05, 0.1, 0.9, 0.95]
    """
    tails = [(1 - level) / 2 for level in levels]
    return [*reversed(tails), *(1 - tail for tail in tails)]


def in_order(output: Tensor) -> tuple[Tensor, Tensor]:
    """Lower and upper quantiles, (n, L) each from the innermost outwards, of a network's outputs (n, 2L), sorted."""
    q = output.sort(dim=1).values
    levels = q.shape[1] // 2
    return q[:, :levels].flip(1), q[:, levels:]


def conformal_quantiles(scores: Tensor, levels: list[Fraction]) -> Tensor:
    """The k-th smallest of the scores (N, L) of each level, k = ceil((1 - alpha)(N + 1)): (L,)."""
    ranks = [absolute_rank(level, len(scores)) for level in levels]
    return torch.cat([order_statistics(scores[:, j].clone()[None], [k])[0] for j, k in enumerate(ranks)])


def nested_ends(low: Tensor, high: Tensor, f: Tensor, q: Tensor) -> Tensor:
    """Ends (n, 2, L): [low - q, high + q], made to hold f and the intervals before.

    Parameters
    ----------
    low, high : Tensor (n, L)
        Quantiles from the innermost outwards.
    f : Tensor (n, 1)
        Point predictions, within the innermost quantiles.
    q : Tensor (L,)
        Conformal quantiles; negative ones draw the ends inwards.
    """
    lower, upper = low - q, high + q
    empty = lower > upper
    lower, upper = torch.where(empty, f, lower).minimum(f), torch.where(empty, f, upper).maximum(f)
    return torch.stack([lower.cummin(1).values, upper.cummax(1).values], dim=1)


def _single(rows: Rows) -> Tensor:
    """The targets (N, 1)."""
    assert rows.y is not None
    if rows.y.shape[1] != 1:
        raise ValueError(f"y has {rows.y.shape[1]} columns, quantiles are learned of one target")
    return rows.y
