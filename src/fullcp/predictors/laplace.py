"""LA: linearised Laplace intervals, the Bayesian baseline."""

from __future__ import annotations

from fractions import Fraction
from math import lgamma, log, pi
from numbers import Real
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Self

from fullcp.curvature import check_structure
from fullcp.features import Network
from fullcp.inputs import read_label, read_levels
from fullcp.predictors.base import DEFAULT_MEMORY, Batch, Predictor
from fullcp.predictors.posterior import Posterior
from fullcp.tuning import tuning_facts, tuning_from


class LaplaceRegressor(Predictor):
    """Linearised Laplace: Gaussian predictive intervals f +- z sigma sqrt(1 + h). Not conformal, no guarantee.

    With several outputs the predictive distribution is a Gaussian with covariance sigma^2 (I + V); its regions are
    ellipsoids, see `ellipsoid_volume` and `ellipsoid_contains`. `predict_interval` gives each output's own interval.

    Parameters
    ----------
    model : torch.nn.Module
        The trained network, (n, ...) -> (n,) or (n, O). It is never changed.
    curvature : "auto", "full", "kfac", "last_layer", "diagonal", "low_rank" or "low_rank:200"
        See `FullConformalRegressor`.
    l2 : "marglik", float, or array of one value per parameter tensor or per parameter
        The ridge penalty in sum scale, see `FullConformalRegressor`: sigma^2 times the prior precision. "marglik"
        tunes it and the noise by the marginal likelihood.
    noise : float or None
        Standard deviation sigma of the observation noise; None takes the tuned one with l2="marglik", otherwise the
        root mean square training residual.
    parameters : None, str, sequence of str, or callable
        Which parameters count, of those with requires_grad; see `FullConformalRegressor`.
    memory : str or int
        Working memory, such as "2GB".

    Attributes
    ----------
    noise_ : the noise in use.
    curvature_choice_ : what curvature="auto" came to and why, in words.
    curvature_ : the fitted curvature.
    tuning_ : the tuned l2 and noise; None where l2 was given.

    Examples
    --------
    >>> import torch, fullcp
    >>> _ = torch.manual_seed(0)
    >>> X, y = torch.randn(50, 3), torch.randn(50)
    >>> la = fullcp.LaplaceRegressor(torch.nn.Linear(3, 1), noise=1.0).fit(X, y)
    >>> la.predict_interval(X[:2], confidence_level=0.95).intervals.shape
    torch.Size([2, 2, 1])
    """

    _first_step: ClassVar[str] = "fit"

    def __init__(
        self,
        model: nn.Module,
        curvature: str = "auto",
        l2: Any = "marglik",
        *,
        noise: float | None = None,
        parameters: Any = None,
        memory: str | int = DEFAULT_MEMORY,
    ):
        self.model = model
        self.curvature = curvature
        self.l2 = l2
        self.noise = noise
        self.parameters = parameters
        self.memory = memory

    def fit(self, X: object, y: object = None) -> Self:
        """Compute curvature and noise on the rows the network was trained on.

        Parameters
        ----------
        X : array, tensor or frame (N, ...), or a DataLoader of (inputs, targets)
        y : (N,) or (N, O); left out with a DataLoader
        """
        check_structure(self.curvature)
        noise = self._read_noise()
        rows = self._read_data(X, y)
        posterior = Posterior.fit(self.model, rows, self.curvature, self.l2, self._budget(), self.parameters)
        if noise is None:
            noise = posterior.tuning.noise if posterior.tuning else posterior.error
            if noise == 0:
                raise ValueError("noise cannot be taken from training residuals that are all zero: pass it")
        self.noise_ = noise
        self._posterior, self.curvature_, self.tuning_ = posterior, posterior.curvature, posterior.tuning
        self.curvature_choice_ = posterior.choice
        self._keep(posterior.jacobian, len(rows.x), rows.columns)
        return self

    def ellipsoid_volume(self, X: object, confidence_level: object = 0.9) -> Any:
        """Volumes of the predictive ellipsoids, (n, levels)."""
        levels = read_levels(confidence_level)
        rows = self._read_inputs(X)
        O = self.network_.outputs
        unit_ball = O / 2 * log(pi) - lgamma(O / 2 + 1)
        radii = chi_square_quantiles(levels, O)
        logs = []
        for _, batch in self._batches(rows.x):
            half_log_det = self._covariance(batch).logdet() / 2  # (m,)
            logs.append(half_log_det.cpu().unsqueeze(1) + unit_ball + O / 2 * radii.log())
        return rows.origin.restore(torch.cat(logs).exp())

    def ellipsoid_contains(self, X: object, y: object, confidence_level: object = 0.9) -> Any:
        """Whether the labels y (n,) or (n, O) lie in the predictive ellipsoids, (n, levels)."""
        levels = read_levels(confidence_level)
        rows = self._read_inputs(X)
        O = self.network_.outputs
        labels = read_label(y, len(rows.x), O, rows.x.device)
        radii = chi_square_quantiles(levels, O)
        distances = []
        for where, batch in self._batches(rows.x):
            r = (labels[where] - batch.f).unsqueeze(2)  # (m, O, 1)
            distances.append((r * torch.linalg.solve(self._covariance(batch), r)).sum((1, 2)))
        return rows.origin.restore(torch.cat(distances).cpu().unsqueeze(1) <= radii)

    def _covariance(self, batch: Batch) -> Tensor:
        assert batch.phi is not None
        return self.noise_**2 * self._posterior.covariance(batch.phi)

    def _deviation(self, batch: Batch) -> Tensor:
        assert batch.phi is not None
        return self.noise_ * self._posterior.spread(batch.phi)

    def _offsets(self, batch: Batch, levels: list[Fraction]) -> Tensor:
        deviation = self._deviation(batch).unsqueeze(1)  # (m, 1, O)
        tails = torch.tensor([float(1 - level) / 2 for level in levels], dtype=deviation.dtype, device=deviation.device)
        half = -torch.special.ndtri(tails).unsqueeze(1) * deviation  # (m, L, O)
        return torch.stack([-half, half], dim=1)

    def _p_values(self, batch: Batch, y: Tensor) -> Tensor:
        return torch.special.erfc(((y - batch.f) / self._deviation(batch)).abs() / 2**0.5)

    def _read_noise(self) -> float | None:
        if self.noise is None:
            return None
        if isinstance(self.noise, bool) or not isinstance(self.noise, Real):
            raise TypeError(f"noise must be a number or None, got {self.noise!r}")
        if not 0 < self.noise < float("inf"):
            raise ValueError(f"noise must be positive and finite, got {self.noise}")
        return float(self.noise)

    def _state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return self._posterior.state(), {
            "noise": self.noise_,
            "tuning": tuning_facts(self.tuning_),
            "choice": self.curvature_choice_,
        }

    def _restore(self, network: dict[str, Any], state: dict[str, Tensor], facts: dict[str, Any]) -> Network:
        self._posterior = Posterior.restore(self.model, network, self._budget(), state)
        self.curvature_ = self._posterior.curvature
        self.noise_, self.curvature_choice_ = float(facts["noise"]), facts["choice"]
        self.tuning_ = tuning_from(facts["tuning"])
        return self._posterior.jacobian


def chi_square_quantiles(levels: list[Fraction], freedom: int) -> Tensor:
    """The quantiles of the chi-square distribution, float64 (L,)."""
    from scipy.special import chdtri

    return torch.tensor([float(chdtri(freedom, float(1 - level))) for level in levels], dtype=torch.float64)
