"""A scikit-learn regressor that trains the paper's network and gives full conformal intervals with it."""

from __future__ import annotations

import warnings
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from typing_extensions import Self

from fullcp.calibration import calibration_share
from fullcp.data import Standardizer
from fullcp.influence import RESIDUALS, SCORES
from fullcp.inputs import check_choice, check_positive_int, read_levels
from fullcp.memory import DEFAULT_MEMORY, parse_memory
from fullcp.predictors import FullConformalRegressor, InformedSplitConformalRegressor, PredictionIntervals
from fullcp.training import Schedule, Training, mlp, replicate, train

try:
    from sklearn.base import BaseEstimator, RegressorMixin
    from sklearn.utils import check_array, check_random_state
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError as error:
    raise ImportError('fullcp.sklearn needs scikit-learn 1.6 or later: pip install "fullcp[sklearn]"') from error

Array = NDArray[np.float64]
Rows = NDArray[np.int64]

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "gelu": nn.GELU,
    "relu": nn.ReLU,
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
    "logistic": nn.Sigmoid,
    "identity": nn.Identity,
}


class FullConformalMLPRegressor(RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """Multi-layer perceptron with full conformal prediction intervals (ACP-GN), for scikit-learn.

    `fit` standardises X and y, trains the network, tunes its ridge penalty by the marginal likelihood while it
    trains, and prepares the intervals, all on the same rows; with `guarantee=True` it holds some rows out for
    calibration (the informed split). Everything that comes out is in the units of y.

    Parameters
    ----------
    hidden_layer_sizes : int or sequence of ints
        Units of each hidden layer; () is a linear model.
    activation : "gelu", "relu", "silu", "tanh", "logistic" or "identity"
    l2 : "marglik", float, or array of one value per parameter tensor or per parameter
        The ridge penalty of the sum (not the mean) of squares, 1/2 sum (y - f)^2 + 1/2 l2 |theta|^2, on standardised
        data. "marglik" tunes it, one value per parameter tensor, and the noise with it.
    conformity_score : "studentized", "standard" or "deleted"
        The `score` of the predictors; that name is taken by the method which gives R^2.
    residuals : "auto", "absolute" or "signed"
        As for `fullcp.FullConformalRegressor`; several targets take signed residuals.
    max_iter : int
        Epochs. All of them are trained: the learning rate falls over their number. A few hundred rows take a few
        seconds. The paper's 5,000 take longer and help where there is little noise; with l2="marglik", fewer than
        1,000 tune more often, so that they tune as much.
    batch_size : int
    learning_rate : (first, last)
        The ends of Adam's cosine schedule.
    refine : bool
        Move predictions and residuals to the ridge solution of the linearised network. Worth it for a network that
        was not trained to a minimum, of which a `fullcp.FarFromMinimumWarning` tells. With `guarantee=True` that is
        part of the method.
    guarantee : bool
        False: intervals of all rows, with coverage close to the level (`fullcp.FullConformalRegressor`). True: coverage
        of at least the level, for one target, as long as rows are exchangeable
        (`fullcp.InformedSplitConformalRegressor`); of several targets nothing is guaranteed, and `fit` warns.
        Standardising, training and tuning see the training part alone. A search over settings that sees all rows costs
        the guarantee: keep rows out of it for the last fit.
    calibration : float in (0, 1), or None
        The share of rows held out with `guarantee=True`, drawn at random. None is what `fullcp.calibration_share`
        proposes for `confidence_level`: give the highest level here that you will ask for.
    confidence_level : float or sequence of floats in (0, 1)
        What `predict_interval` takes unless it is told otherwise.
    random_state : int, RandomState instance or None
        Of the initial weights and the order of the rows. None draws from NumPy's global state.
    device : str or torch.device
        Where the network lives, such as "cuda".
    memory : str or int
        Working memory for the intervals, such as "2GB".

    Attributes
    ----------
    model_ : torch.nn.Sequential
        The trained network, of standardised inputs and targets, in float64.
    predictor_ : `fullcp.FullConformalRegressor` or `fullcp.InformedSplitConformalRegressor`
        What makes the intervals, on standardised data too.
    x_scaler_, y_scaler_ : means and standard deviations of the training rows.
    calibration_rows_ : array of int
        The rows held out, in order; empty without a guarantee.
    l2_ : the ridge penalty, given or tuned.
    noise_ : float, or array (O,) for several targets
        Standard deviation of the noise in the units of y; None where l2 was given.
    log_marginal_likelihood_ : of the standardised targets, by which l2 was tuned; None where l2 was given.
    loss_curve_ : list of float
        The objective a row, one value an epoch.
    n_iter_ : epochs trained.
    n_features_in_ : int
    feature_names_in_ : names of the columns, where X was a frame with such names

    Examples
    --------
    >>> import numpy as np
    >>> from fullcp.sklearn import FullConformalMLPRegressor
    >>> X = np.random.default_rng(0).normal(size=(100, 3))
    >>> regressor = FullConformalMLPRegressor(max_iter=50, random_state=0).fit(X, 10 + X.sum(axis=1))
    >>> y_pred, intervals = regressor.predict_interval(X[:5], confidence_level=[0.9, 0.95])
    >>> y_pred.shape, intervals.shape
    ((5,), (5, 2, 2))
    """

    def __init__(
        self,
        hidden_layer_sizes: Any = (50,),
        *,
        activation: str = "gelu",
        l2: Any = "marglik",
        conformity_score: str = "studentized",
        residuals: str = "auto",
        max_iter: int = 2000,
        batch_size: int = 256,
        learning_rate: tuple[float, float] = (1e-2, 1e-5),
        refine: bool = False,
        guarantee: bool = False,
        calibration: float | None = None,
        confidence_level: Any = 0.9,
        random_state: Any = None,
        device: str | torch.device = "cpu",
        memory: str | int = DEFAULT_MEMORY,
    ):
        self.hidden_layer_sizes = hidden_layer_sizes
        self.activation = activation
        self.l2 = l2
        self.conformity_score = conformity_score
        self.residuals = residuals
        self.max_iter = max_iter
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.refine = refine
        self.guarantee = guarantee
        self.calibration = calibration
        self.confidence_level = confidence_level
        self.random_state = random_state
        self.device = device
        self.memory = memory

    def fit(self, X: Any, y: Any) -> Self:
        """Train the network and prepare the intervals.

        Parameters
        ----------
        X : array or frame (N, features)
        y : (N,), or (N, O) for several targets
        """
        hidden, device = self._check_parameters()
        X, y = validate_data(self, X, y, dtype=np.float64, multi_output=True, y_numeric=True, ensure_min_samples=2)
        y = check_array(y, dtype=np.float64, ensure_2d=False, input_name="y")
        y = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y
        outputs = 1 if y.ndim == 1 else y.shape[1]
        if outputs > 1 and self.residuals == "absolute":
            raise ValueError(f"residuals='absolute' needs one target, y has {outputs}: use 'signed' or 'auto'")
        if self.guarantee and outputs > 1:
            warnings.warn(
                f"guarantee=True guarantees nothing here: y has {outputs} targets, and the informed split guarantees "
                "coverage for one. Fit one estimator for each target, or take fullcp.NormalizedSplitConformalRegressor "
                "or fullcp.SplitConformalRegressor, which keep it for each of several",
                UserWarning,
                stacklevel=2,
            )
        seed = int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))
        rows, held = self._split(len(X), "absolute" if outputs == 1 else "signed", seed)
        x_scaler, y_scaler = Standardizer.of(X[rows]), Standardizer.of(y[rows])
        X, y = x_scaler.transform(X), y_scaler.transform(y)
        activation = ACTIVATIONS[self.activation]
        (model,) = replicate(lambda: mlp(X.shape[1], hidden, outputs, activation).to(device, torch.float32), [seed])
        training = self._train(model, X[rows], y[rows], seed)
        self.predictor_ = self._conformalize(model, training, (X[rows], y[rows]), (X[held], y[held]))
        self.model_ = model
        self.calibration_rows_ = held
        self.x_scaler_, self.y_scaler_ = x_scaler, y_scaler
        self._take_notes(training)
        return self

    def predict(self, X: Any) -> Array:
        """Point predictions, (n,) or (n, O)."""
        X = self._standardised(X)
        return self.y_scaler_.inverse(self.predictor_.predict(X))

    def predict_interval(
        self, X: Any, confidence_level: Any = None, *, joint: str | None = None
    ) -> PredictionIntervals:
        """Point predictions and intervals.

        Parameters
        ----------
        X : array or frame (n, features)
        confidence_level : float or sequence of L floats in (0, 1), or None for the estimator's own
        joint : None or "bonferroni"
            With several targets, "bonferroni" makes the intervals of a row hold together at the level.

        Returns
        -------
        PredictionIntervals
            A pair (prediction, intervals) of shapes (n,) and (n, 2, L), with O targets (n, O) and (n, 2, L, O).
        """
        X = self._standardised(X)
        found = self.predictor_.predict_interval(X, self._level(confidence_level), joint=joint)
        inverse = self.y_scaler_.inverse
        return PredictionIntervals(inverse(found.prediction), inverse(found.intervals), found.levels)

    def predict_set(self, X: Any, confidence_level: float | None = None, *, joint: str | None = None) -> list[Any]:
        """The exact prediction set of each row: a list of (lower, upper) pairs, or of O such lists.

        Parameters
        ----------
        X, joint : as in `predict_interval`
        confidence_level : float, or None for the estimator's own
        """
        X = self._standardised(X)
        sets = self.predictor_.predict_set(X, self._level(confidence_level), joint=joint)
        mean, scale = self.y_scaler_.mean.tolist(), self.y_scaler_.scale.tolist()
        if isinstance(mean, float):
            return [_scaled(pieces, mean, scale) for pieces in sets]
        columns = list(zip(mean, scale, strict=True))
        return [[_scaled(pieces, *column) for pieces, column in zip(row, columns, strict=True)] for row in sets]

    def p_value(self, X: Any, y: Any, *, joint: str | None = None) -> Array:
        """The p-value of each label: it lies in the set of level 1 - alpha where the p-value exceeds alpha.

        Parameters
        ----------
        X : array or frame (n, features)
        y : labels (n,) or (n, O), or one number for all
        joint : None or "bonferroni"
            None gives each target its own p-value, (n,) or (n, O); "bonferroni" one a row for all targets, (n,).
        """
        X = self._standardised(X)
        if np.ndim(y) == 0:
            y = np.full((len(X), *self.y_scaler_.mean.shape), y)
        y = check_array(y, dtype=np.float64, ensure_2d=False, input_name="y")
        return self.predictor_.p_value(X, self.y_scaler_.transform(y), joint=joint)

    def __sklearn_tags__(self) -> Any:
        """What scikit-learn should know: several targets are welcome."""
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    # The steps of a fit

    def _check_parameters(self) -> tuple[list[int], torch.device]:
        """Refuse what later steps would only refuse after training, or under another name."""
        check_choice("activation", self.activation, tuple(ACTIVATIONS))
        check_choice("conformity_score", self.conformity_score, SCORES)
        check_choice("residuals", self.residuals, ("auto", *RESIDUALS))
        check_positive_int("max_iter", self.max_iter)
        for name in ("refine", "guarantee"):
            if not isinstance(getattr(self, name), (bool, np.bool_)):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.calibration is not None:
            _check_share(self.calibration)
        read_levels(self.confidence_level)
        parse_memory(self.memory)
        return _read_sizes(self.hidden_layer_sizes), _read_device(self.device)

    def _train(self, model: nn.Module, X: Array, y: Array, seed: int) -> Training:
        recipe: dict[str, Any] = {"batch_size": self.batch_size, "learning_rate": self.learning_rate}
        recipe |= {"epochs": self.max_iter}
        recipe |= {"tuning": _schedule(self.max_iter)} if isinstance(self.l2, str) else {}
        training = train(model, X, y, l2=self.l2, seed=seed, **recipe)
        # Float32 sums depend on how many rows there are: 2e-6 between a row alone and among others, here 5e-15.
        model.double()
        return training

    def _conformalize(
        self, model: nn.Module, training: Training, rows: tuple[Array, Array], held: tuple[Array, Array]
    ) -> FullConformalRegressor:
        settings: dict[str, Any] = {"score": self.conformity_score, "residuals": self.residuals, "memory": self.memory}
        if self.guarantee:
            informed = InformedSplitConformalRegressor(model, l2=training.l2, **settings)
            return informed.fit(*rows).conformalize(*held)
        predictor = FullConformalRegressor(model, l2=training.l2, refine=bool(self.refine), **settings)
        return predictor.conformalize(*rows)

    def _split(self, n: int, residuals: str, seed: int) -> tuple[Rows, Rows]:
        """The rows to train on and those to calibrate on, all and none without a guarantee."""
        if not self.guarantee:
            return np.arange(n), np.arange(0)
        if n < 4:
            raise ValueError(f"guarantee=True needs at least 4 rows, to train on and to calibrate on: X has {n}")
        residuals = residuals if self.residuals == "auto" else self.residuals
        share = self.calibration
        if share is None:
            share = calibration_share(n, self.confidence_level, residuals=residuals)
        count = min(max(round(n * share), 2), n - 2)
        order = np.random.default_rng(seed).permutation(n)
        return np.sort(order[count:]), np.sort(order[:count])

    def _take_notes(self, training: Training) -> None:
        tuned = training.log_marginal_likelihood is not None
        noise = training.noise * self.y_scaler_.scale
        self.l2_ = training.l2
        self.noise_ = (noise if noise.ndim else float(noise)) if tuned else None
        self.log_marginal_likelihood_ = training.log_marginal_likelihood
        self.loss_curve_ = training.losses
        self.n_iter_ = training.epochs

    # Predictions

    def _standardised(self, X: Any) -> Array:
        check_is_fitted(self, "predictor_")
        return self.x_scaler_.transform(validate_data(self, X, dtype=np.float64, reset=False))

    def _level(self, confidence_level: Any) -> Any:
        return self.confidence_level if confidence_level is None else confidence_level


def _schedule(epochs: int) -> Schedule:
    """The paper's tuning from 1,000 epochs on; a shorter training is tuned as often as one of 1,000."""
    paper = Schedule()
    return Schedule(burn_in=min(paper.burn_in, max(1, epochs // 10)), every=min(paper.every, max(1, epochs // 20)))


def _check_share(share: Any) -> None:
    if isinstance(share, bool) or not isinstance(share, Real):
        raise TypeError(f"calibration must be a number between 0 and 1 or None, got {share!r}")
    if not 0 < float(share) < 1:
        raise ValueError(f"calibration must lie between 0 and 1, got {share!r}")


def _scaled(pieces: list[tuple[float, float]], mean: float, scale: float) -> list[tuple[float, float]]:
    return [(low * scale + mean, high * scale + mean) for low, high in pieces]


def _read_sizes(sizes: Any) -> list[int]:
    """The units of each hidden layer."""
    if isinstance(sizes, Integral):
        sizes = [sizes]
    if isinstance(sizes, (str, bytes, dict)) or not np.iterable(sizes):
        raise TypeError(f"hidden_layer_sizes must be a whole number or a sequence of them, got {sizes!r}")
    return [check_positive_int("hidden_layer_sizes", size) for size in sizes]


def _read_device(device: Any) -> torch.device:
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except Exception as error:  # torch has a type for each backend that is missing
        raise ValueError(f"device must be one that torch has, such as 'cpu' or 'cuda', got {device!r}") from error
    return found
