"""CRF: split conformal prediction normalised by a second network that predicts the size of residuals."""

from __future__ import annotations

from math import log
from numbers import Real
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Self

from fullcp.features import Network
from fullcp.influence import RESIDUALS
from fullcp.inputs import Rows, check_choice, model_traits
from fullcp.predictors.base import DEFAULT_MEMORY, Batch, NotFittedError, kept_setting
from fullcp.predictors.fingerprint import Fingerprint
from fullcp.predictors.learned import RECIPE, LearnedNetwork, predict_rows
from fullcp.predictors.split import SplitConformalRegressor

_LARGEST = log(torch.finfo(torch.float64).max) / 2  # half the range of exponents: products of two normalisers fit


class ResidualConformalRegressor(SplitConformalRegressor):
    """Split conformal prediction with widths that follow a second network's idea of the error (CRF).

    A network g learns log |y - f| on the training rows. Scores are |y - f| / (exp(g(x)) + beta). Coverage is guaranteed
    as for any split method, whatever g has learned: the calibration rows must have had no part in training either
    network. The training residuals of a network that overfits are smaller than those to come, so that g may say little.

    Parameters
    ----------
    model : torch.nn.Module
        The trained network, (n, ...) -> (n,) or (n, O). It is never changed.
    residual_model : torch.nn.Module, optional
        A network with an output for each of those of `model`. A copy of it is trained, from the weights it has and only
        where they have requires_grad. None makes the paper's network, for rows that are flat.
    beta : float
        What is added to the size that g predicts, in the units of y: the larger, the more alike the widths. The paper
        takes 1 for standardised targets, 0.01 for the corners of boxes.
    residuals : "absolute" or "signed"
    l2, epochs, batch_size, learning_rate, seed
        How g is trained: as in `fullcp.training.train`, with a smaller learning rate, for log residuals are noisy. The
        seed is that of the first weights, too. With ``epochs=0`` `residual_model` is taken as it is, trained already.
    memory : str or int
        Working memory, such as "2GB".

    Attributes
    ----------
    residual_model_ : the network g.
    training_ : how its training went; None in a predictor that was loaded.
    n_rows_ : number of calibration rows.

    Notes
    -----
    A residual of zero has no logarithm. Those below the rounding error of the largest prediction or target, eps times
    that in the network's precision, are taken to be of that size.

    Examples
    --------
    >>> import torch, fullcp
    >>> _ = torch.manual_seed(0)
    >>> X, y = torch.randn(100, 3), torch.randn(100)
    >>> cp = fullcp.ResidualConformalRegressor(torch.nn.Linear(3, 1), epochs=20)
    >>> cp = cp.fit(X[:50], y[:50]).conformalize(X[50:], y[50:])
    >>> cp.predict_interval(X[:2]).intervals.shape
    torch.Size([2, 2, 1])
    """

    _first_step: ClassVar[str] = "fit(X_train, y_train).conformalize"

    def __init__(
        self,
        model: nn.Module,
        residual_model: nn.Module | None = None,
        beta: float = 1.0,
        residuals: str = "absolute",
        *,
        l2: Any = 1.0,
        epochs: int = 1000,
        batch_size: int = 256,
        learning_rate: tuple[float, float] = (1e-3, 1e-5),
        seed: int = 0,
        memory: str | int = DEFAULT_MEMORY,
    ):
        self.model = model
        self.residual_model = residual_model
        self.beta = beta
        self.residuals = residuals
        self.l2 = l2
        self.epochs = epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.seed = seed
        self.memory = memory

    def fit(self, X: object, y: object = None) -> Self:
        """Train g on the residuals of the rows the network was trained on.

        Parameters
        ----------
        X : array, tensor or frame (N, ...), or a DataLoader of (inputs, targets)
        y : (N,) or (N, O); left out with a DataLoader
        """
        self._check_choices()
        rows = self._read_data(X, y)
        network, fingerprint = Network(self.model, rows.x), Fingerprint(self.model)
        learned = LearnedNetwork.train(
            "residual_model",
            self.residual_model,
            rows,
            self._log_residuals(network, rows),
            network.outputs,
            model_traits(self.model, trainable=False),
            **{name: getattr(self, name) for name in RECIPE},
        )
        if hasattr(self, "network_"):
            del self.network_  # calibration with another normaliser holds no longer
        self._take(network, fingerprint, learned)
        return self

    def conformalize(self, X: object, y: object = None) -> Self:
        """Compute normalised residuals on calibration rows.

        Parameters
        ----------
        X : array, tensor or frame (N, ...), or a DataLoader of (inputs, targets)
            Rows that neither network has seen.
        y : (N,) or (N, O); left out with a DataLoader
        """
        self._check_choices()
        if not hasattr(self, "_learned"):
            raise NotFittedError(f"{type(self).__name__}: call fit(X_train, y_train) before conformalize")
        if not self._fit_fingerprint.matches(self.model):
            raise NotFittedError(f"{type(self).__name__}: the model has changed since fit; call fit again")
        rows = self._read_data(X, y)
        self._learned.check_rows(rows)
        self._calibrate(self._fit_network, rows)
        self._beta = float(self.beta)
        return self

    @classmethod
    def load(cls, path: str | Path, model: nn.Module, residual_model: nn.Module | None = None) -> Self:
        """Read what `save` wrote; `model` must be the network it was made with, on any device.

        The file holds the weights of g. Where you gave its network, give `residual_model` with the same layers again,
        whatever its weights.
        """
        return cls._load(path, {"model": model, "residual_model": residual_model})

    def _check_choices(self) -> None:
        check_choice("residuals", self.residuals, RESIDUALS)
        if isinstance(self.beta, bool) or not isinstance(self.beta, Real):
            raise TypeError(f"beta must be a number, got {self.beta!r}")
        if not 0 < float(self.beta) < float("inf"):
            raise ValueError(f"beta must be positive and finite, got {self.beta!r}")

    def _take(self, network: Network, fingerprint: Fingerprint, learned: LearnedNetwork) -> None:
        """Keep what was fitted."""
        self._fit_network, self._fit_fingerprint, self._learned = network, fingerprint, learned
        self._fit_settings = {name: kept_setting(getattr(self, name)) for name in RECIPE}
        self.residual_model_, self.training_ = learned.model, learned.training

    def _log_residuals(self, network: Network, rows: Rows) -> Tensor:
        """log |y - f|, (N, O); see the notes of the class on zeros."""
        y = self._check_targets(network, rows)
        f = predict_rows(network, rows.x, self._budget() // 8)
        return log_residuals(y, f, model_traits(self.model, trainable=False).dtype)

    def _evaluate(self, network: Network, x: Tensor, start: int) -> tuple[Tensor, Tensor]:
        f, _ = super()._evaluate(network, x, start)
        return f, self._sizes(x, float(self.beta))

    def _normaliser_at(self, batch: Batch) -> Tensor:
        return self._sizes(batch.x, self._beta)

    def _sizes(self, x: Tensor, beta: float) -> Tensor:
        """exp(g) + beta, (n, O), with g where exp can bear it: a network may say anything far from its rows."""
        g = self._learned.predict(x, self._budget() // 8)
        return g.clamp(-_LARGEST, _LARGEST).exp() + beta

    def _check_fitted(self) -> None:
        super()._check_fitted()
        if not self._learned.fingerprint.matches(self._learned.model):
            raise NotFittedError(f"{type(self).__name__}: residual_model_ has changed since fit; call fit again")

    def _earlier_settings(self) -> dict[str, Any]:
        return self._fit_settings

    def _state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, facts = super()._state()
        learned, about = self._learned.state()
        return {**tensors, **learned}, {**facts, "beta": self._beta, "learned": about}

    def _restore(self, network: dict[str, Any], state: dict[str, Tensor], facts: dict[str, Any]) -> Network:
        restored = super()._restore(network, state, facts)
        device = model_traits(self.model, trainable=False).device
        learned = LearnedNetwork.restore("residual_model", self.residual_model, device, state, facts["learned"])
        self._beta = facts["beta"]
        self._take(restored, Fingerprint(self.model), learned)
        return restored


def log_residuals(y: Tensor, f: Tensor, dtype: torch.dtype) -> Tensor:
    """log |y - f| of targets y (N, O) and predictions f (N, O) that a network of this dtype made, (N, O).

    Residuals below the rounding error of the largest prediction or target are taken to be of that size.
    """
    largest = torch.maximum(y.abs(), f.abs()).amax(0)
    floor = (torch.finfo(dtype).eps * largest).clamp(min=torch.finfo(y.dtype).tiny)
    return torch.maximum((y - f).abs(), floor).log()
