"""SCP-GN: split conformal prediction normalised by the Gauss-Newton leverage."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn
from typing_extensions import Self

from fullcp.curvature import check_structure, look_at
from fullcp.features import Network
from fullcp.influence import RESIDUALS
from fullcp.inputs import check_all_finite, check_choice
from fullcp.predictors.base import DEFAULT_MEMORY, Batch
from fullcp.predictors.posterior import Posterior
from fullcp.predictors.split import SplitConformalRegressor
from fullcp.predictors.two_steps import TwoSteps
from fullcp.tuning import tuning_facts, tuning_from


class NormalizedSplitConformalRegressor(TwoSteps, SplitConformalRegressor):
    """Split conformal prediction with widths that follow the network's own uncertainty (SCP-GN).

    Scores are |y - f| / sqrt(1 + h(x)): the leverage h, from the curvature of the training rows, is large where the
    training data say little. Coverage is guaranteed as for any split method: the calibration rows must have had no
    part in training or tuning.

    Parameters
    ----------
    model : torch.nn.Module
        The trained network, (n, ...) -> (n,) or (n, O). It is never changed.
    curvature : "auto", "full", "kfac", "last_layer", "diagonal", "low_rank" or "low_rank:200"
        See `FullConformalRegressor`.
    l2 : "marglik", "leave_one_out", float, or array of one value per parameter tensor or per parameter
        The ridge penalty in sum scale, see `FullConformalRegressor`.
    residuals : "absolute" or "signed"
    parameters : None, str, sequence of str, or callable
        Which parameters count, of those with requires_grad; see `FullConformalRegressor`.
    memory : str or int
        Working memory, such as "2GB".

    Attributes
    ----------
    curvature_choice_ : what curvature="auto" came to and why, in words.
    curvature_ : the curvature of the training rows.
    tuning_ : the tuned l2 and noise; None where l2 was given.
    n_rows_ : number of calibration rows.

    Examples
    --------
    >>> import torch, fullcp
    >>> _ = torch.manual_seed(0)
    >>> X, y = torch.randn(100, 3), torch.randn(100)
    >>> cp = fullcp.NormalizedSplitConformalRegressor(torch.nn.Linear(3, 1))
    >>> cp = cp.fit(X[:50], y[:50]).conformalize(X[50:], y[50:])
    >>> cp.predict_interval(X[:2]).intervals.shape
    torch.Size([2, 2, 1])
    """

    _trainable: ClassVar[bool] = True
    _settings_of_fit: ClassVar[tuple[str, ...]] = ("curvature", "l2", "parameters")

    def __init__(
        self,
        model: nn.Module,
        curvature: str = "auto",
        l2: Any = "marglik",
        residuals: str = "absolute",
        *,
        parameters: Any = None,
        memory: str | int = DEFAULT_MEMORY,
    ):
        self.model = model
        self.curvature = curvature
        self.l2 = l2
        self.residuals = residuals
        self.parameters = parameters
        self.memory = memory

    def fit(self, X: object, y: object = None) -> Self:
        """Compute the curvature on the rows the network was trained on.

        Parameters
        ----------
        X : array, tensor or frame (N, ...), or a DataLoader of (inputs, targets)
        y : (N,) or (N, O); left out with a DataLoader
        """
        check_structure(self.curvature)
        check_choice("residuals", self.residuals, RESIDUALS)
        rows = self._read_data(X, y)
        posterior = Posterior.fit(self.model, rows, self.curvature, self.l2, self._budget(), self.parameters)
        self._end_fit(posterior.jacobian, rows, posterior.fingerprint)
        self._posterior = posterior
        self.curvature_, self.tuning_ = posterior.curvature, posterior.tuning
        self.curvature_choice_ = posterior.choice
        return self

    def conformalize(self, X: object, y: object = None) -> Self:
        """Compute normalised residuals on calibration rows.

        Parameters
        ----------
        X : array, tensor or frame (N, ...), or a DataLoader of (inputs, targets)
            Rows that the network has not seen.
        y : (N,) or (N, O); left out with a DataLoader
        """
        check_choice("residuals", self.residuals, RESIDUALS)
        rows = self._read_calibration(X, y)
        self._calibrate(self._posterior.jacobian, rows)
        return self

    def _evaluate(self, network: Network, x: Tensor, start: int) -> tuple[Tensor, Tensor]:
        f, phi = look_at(self._posterior.curvature, self._posterior.jacobian, x)
        check_all_finite(start, {"outputs": f, "gradients": phi})
        return f.double(), self._posterior.spread(phi)

    def _needs_gradients(self) -> bool:
        return True

    def _normaliser_at(self, batch: Batch) -> Tensor:
        assert batch.phi is not None
        return self._posterior.spread(batch.phi)

    def _state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, facts = super()._state()
        return {**tensors, **self._posterior.state()}, {
            **facts,
            "tuning": tuning_facts(self.tuning_),
            "choice": self.curvature_choice_,
        }

    def _restore(self, network: dict[str, Any], state: dict[str, Tensor], facts: dict[str, Any]) -> Network:
        super()._restore(network, state, facts)
        self._posterior = Posterior.restore(self.model, network, self._budget(), state)
        self._fit_network, self._fit_fingerprint = self._posterior.jacobian, self._posterior.fingerprint
        self._fit_columns, self._fit_settings = None, self._loaded_settings()
        self.curvature_choice_ = facts["choice"]
        self.curvature_, self.tuning_ = self._posterior.curvature, tuning_from(facts["tuning"])
        return self._posterior.jacobian
