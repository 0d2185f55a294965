"""The informed split: full conformal ridge regression on calibration rows, with the training rows as its prior."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn
from typing_extensions import Self

from fullcp.features import Network
from fullcp.predictors.base import DEFAULT_MEMORY
from fullcp.predictors.fingerprint import Fingerprint
from fullcp.predictors.full import FullConformalRegressor
from fullcp.predictors.linearised import LinearisedNetwork
from fullcp.predictors.prior import Calibration, Prior, fit_prior
from fullcp.predictors.two_steps import TwoSteps
from fullcp.tuning import tuning_facts, tuning_from


class InformedSplitConformalRegressor(TwoSteps, FullConformalRegressor):
    """Guaranteed coverage at nearly the width of full conformal prediction: take it wherever coverage must hold.

    Split + refine forgets what the training rows said; here they stay, as a fixed quadratic prior on the weights of
    the linearised network. Calibration rows and the test point are added to it alike, as full conformal ridge
    regression does, so that every row serves the predictions and the widths, and a quarter of the rows is enough to
    calibrate on. No network is trained again.

    Coverage is at least the level, on average over data sets, whatever the noise, the network and its fit, as long as
    calibration rows and test points are exchangeable. What breaks the guarantee is calibration rows that had a part in
    something else: in training the network or stopping it, in tuning `l2` (here it is tuned on training rows alone),
    in standardising X or y, in choosing among networks or settings by how they do on these rows. It is for one output.
    With several that share parameters, intervals are quantiles of vector changepoints, output by output, which is no
    conformal set: coverage is close to the level, not guaranteed (docs/theory.md, "Several outputs").

    Parameters
    ----------
    model : torch.nn.Module
        The trained network, (n, ...) -> (n,) or (n, O). It is never changed.
    curvature : "auto", "full", "kfac", "last_layer", "diagonal", "low_rank" or "low_rank:200"
        The structure of the training rows' curvature, see `FullConformalRegressor`. An approximation makes a prior
        that is a little off, and intervals a little wider; calibration rows are exact in any case, so that all scores
        exist and the guarantee stands.
    score : "auto", "studentized", "standard" or "deleted"
        "auto" is "studentized".
    residuals : "auto", "absolute" or "signed"
        "auto" is absolute up to 5,000 calibration rows, signed beyond and for several outputs.
    l2 : "marglik", "leave_one_out", float, or array of one value per parameter tensor or per parameter
        The ridge penalty in sum scale, see `FullConformalRegressor`. "marglik" tunes it on the training rows, which
        costs no guarantee; so does "leave_one_out", which made intervals 2 to 4 % narrower on three of four sets.
    parameters : None, str, sequence of str, or callable
        Which parameters count, of those with requires_grad; see `FullConformalRegressor`.
    memory : str or int
        Working memory, such as "2GB". The factor of the curvature comes on top.

    Attributes
    ----------
    curvature_ : the curvature of training and calibration rows, asked about calibration rows.
    curvature_choice_ : what curvature="auto" came to and why, in words.
    score_, residuals_ : what "auto" came to.
    n_rows_ : number of calibration rows.
    leverages_ : their leverages.
    tuning_ : the tuned l2 and noise; None where l2 was given.
    shift_ : how far the calibration rows (and a network short of its minimum) move the predictions: the root mean
        square change at the calibration rows, as a multiple of the residuals after it.

    Examples
    --------
    >>> import torch, fullcp
    >>> _ = torch.manual_seed(0)
    >>> X = torch.randn(80, 3)
    >>> y = X.sum(1) + 0.1 * torch.randn(80)
    >>> cp = fullcp.InformedSplitConformalRegressor(torch.nn.Linear(3, 1))
    >>> cp = cp.fit(X[:60], y[:60]).conformalize(X[60:], y[60:])
    >>> cp.predict_interval(X[:2]).intervals.shape
    torch.Size([2, 2, 1])
    """

    _settings_of_fit: ClassVar[tuple[str, ...]] = ("curvature", "l2", "parameters")
    _calibration: Calibration

    def __init__(
        self,
        model: nn.Module,
        curvature: str = "auto",
        score: str = "auto",
        residuals: str = "auto",
        l2: Any = "marglik",
        *,
        parameters: Any = None,
        memory: str | int = DEFAULT_MEMORY,
    ):
        self.model = model
        self.curvature = curvature
        self.score = score
        self.residuals = residuals
        self.l2 = l2
        self.parameters = parameters
        self.memory = memory

    def fit(self, X: object, y: object = None) -> Self:
        """Compute curvature and gradient on the rows the network was trained on.

        Parameters
        ----------
        X : array, tensor or frame (N, ...), or a DataLoader of (inputs, targets)
        y : (N,) or (N, O); left out with a DataLoader
        """
        self._check_choices()
        rows = self._read_data(X, y)
        network = LinearisedNetwork.about(self.model, rows, self.curvature, self.l2, self._budget(), self.parameters)
        self._resolve_residuals(1, network.jacobian.outputs)
        prior, fingerprint = fit_prior(network), Fingerprint(self.model)
        self._end_fit(prior.jacobian, rows, fingerprint)
        self._prior: Prior = prior
        self.curvature_choice_, self.tuning_ = network.why, network.tuning
        return self

    def conformalize(self, X: object, y: object = None) -> Self:
        """Add calibration rows and compute all that intervals need.

        Parameters
        ----------
        X : array, tensor or frame (N, ...), or a DataLoader of (inputs, targets)
            Rows that the network has not seen.
        y : (N,) or (N, O); left out with a DataLoader
        """
        self._check_choices()
        rows = self._read_calibration(X, y)
        jacobian = self._prior.jacobian
        y_checked = self._check_targets(jacobian, rows)
        chosen = self._resolve_residuals(len(rows.x), jacobian.outputs), self._resolve_score("full")
        self._take_calibration(self._prior.calibrate(rows.x, y_checked, self._budget()), *chosen)
        self._keep(jacobian, len(rows.x), rows.columns)
        return self

    def _is_refined(self) -> bool:
        return True

    def _take_calibration(self, found: Calibration, residuals: str, score: str) -> None:
        self._assemble(found.curvature, found.features, found.e, found.slack, found.step, residuals, score)
        self._calibration, self.shift_ = found, found.shift

    def _state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, facts = self._calibration.state()
        chosen = {"residuals": self.residuals_, "score": self.score_, "choice": self.curvature_choice_}
        return tensors, {**facts, **chosen, "tuning": tuning_facts(self.tuning_)}

    def _restore(self, network: dict[str, Any], state: dict[str, Tensor], facts: dict[str, Any]) -> Network:
        found = Calibration.restore(self.model, network, state, facts, self._budget())
        self._take_calibration(found, facts["residuals"], facts["score"])
        self.curvature_choice_, self.tuning_ = facts["choice"], tuning_from(facts["tuning"])
        self._fit_settings = self._loaded_settings()
        return found.jacobian
