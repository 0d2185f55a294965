"""Ascent of the marginal likelihood in steps of Adam, as in the paper's tuning during training.

The steps are small, so gamma hardly changes from one to the next: where it takes a factorisation, it is taken exactly
every few steps and by its first-order expansion in log l2 in between. Where the ascent comes to rest does not change by
that, since the expansion is exact at the point about which it is made.

Precisions and variances stay within the bounds of the search on a trained network: without noise in the data, the
likelihood of an interpolating network rises without end.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fullcp.tuning.evidence import BOUND, Evidence, penalty
from fullcp.tuning.forms import Form

ALL = slice(None)
_BETAS, _EPS = (0.9, 0.999), 1e-8  # the defaults of torch.optim.Adam

# 50 steps of rates 1e-2 to 1e-3 then take 3 expansions. Over 20 such climbs l2 stays within 7e-4 (relative) of the
# exact ascent on yacht (D = 401, 12 ms a climb on one core instead of 150) and on boston (D = 751, 54 ms instead of
# 750); a reach of 0.05 takes 1.6 times as long for 2e-4, one of 0.3 half as long for 1e-2.
_REACH = 0.1


class Ascent:
    """Precisions and noise of B networks on their way up, with Adam's moments.

    Both logarithms start at 0. Noise is its standard deviation here, so that steps of Adam are those of the paper.

    Parameters
    ----------
    networks, groups : B and G
    reach : float
        The sum of learning rates over which one expansion of gamma serves; 0 is the exact ascent.
    device : of the tensors.

    Attributes
    ----------
    log_precision : Tensor (B, G)
    log_noise : Tensor (B,)
    """

    def __init__(self, networks: int, groups: int, *, reach: float = _REACH, device: torch.device | str | None = None):
        self.reach = reach
        self._theta = torch.zeros(networks, groups + 1, dtype=torch.float64, device=device)
        self._steps = torch.zeros(networks, 1, dtype=torch.float64, device=device)  # of Adam, taken so far
        self._first = torch.zeros_like(self._theta)  # Adam's moments
        self._second = torch.zeros_like(self._theta)

    @property
    def log_precision(self) -> Tensor:
        """Log d, (B, G)."""
        return self._theta[:, :-1]

    @property
    def log_noise(self) -> Tensor:
        """Log sigma, (B,)."""
        return self._theta[:, -1]

    @property
    def l2(self) -> Tensor:
        """sigma^2 d, the penalty of the predictors, (B, G)."""
        return penalty(self.log_precision, 2 * self.log_noise)

    def climb(self, evidence: Evidence, rates: Sequence[float], at: slice = ALL) -> Tensor:
        """One step of Adam for each learning rate; the log marginal likelihood (b,) at the end, which is exact.

        A network that has no value somewhere on its way, because H is singular there, stays where it is, with the value
        -inf; the others climb.

        Parameters
        ----------
        evidence : of the networks `at`.
        rates : the learning rates.
        at : a block of networks.
        """
        self._theta = self._theta.clone()  # what was read before stays
        before = [part[at].clone() for part in self._parts()]
        gamma = _EffectiveParameters(evidence.form, self.reach)
        climbs = torch.ones_like(self.log_noise[at], dtype=torch.bool)
        for rate in rates:
            log_precision, log_variance = self.log_precision[at], 2 * self.log_noise[at]
            found = gamma(log_precision + log_variance.unsqueeze(1), rate)
            in_log_precision, in_log_variance = evidence.gradient(log_precision, log_variance, found)
            gradient = torch.cat([in_log_precision, 2 * in_log_variance.unsqueeze(1)], 1)
            climbs &= gradient.isfinite().all(1)
            self._step(gradient, rate, at)
        value = evidence.value(self.log_precision[at], 2 * self.log_noise[at])
        climbs &= value.isfinite()
        for part, kept in zip(self._parts(), before, strict=True):
            part[at] = torch.where(climbs.unsqueeze(1), part[at], kept)
        return torch.where(climbs, value, -torch.inf)

    def keep(self, indices: Tensor | Sequence[int]) -> None:
        """Go on with some of the networks, in the order given."""
        at = torch.as_tensor(indices, device=self._theta.device)
        self._theta, self._first, self._second = self._theta[at], self._first[at], self._second[at]
        self._steps = self._steps[at]

    def state(self) -> dict[str, Tensor]:
        """All there is to know; `restore` takes it up again."""
        return {
            "theta": self._theta.clone(),
            "first": self._first.clone(),
            "second": self._second.clone(),
            "steps": self._steps.clone(),
        }

    def restore(self, state: dict[str, Tensor]) -> None:
        """Go on from a `state()`."""
        self._theta, self._first, self._second = (state[name].clone() for name in ("theta", "first", "second"))
        self._steps = state["steps"].clone()

    def _step(self, gradient: Tensor, rate: float, at: slice) -> None:
        """One step of torch.optim.Adam, uphill."""
        beta1, beta2 = _BETAS
        first, second, steps = self._first[at], self._second[at], self._steps[at].add_(1)
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        spread = second.sqrt() / (1 - beta2**steps).sqrt() + _EPS
        theta = self._theta[at]
        theta += rate / (1 - beta1**steps) * first / spread
        theta[:, :-1].clamp_(-BOUND, BOUND)
        theta[:, -1].clamp_(-BOUND / 2, BOUND / 2)  # of the standard deviation

    def _parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self._theta, self._first, self._second, self._steps


class _EffectiveParameters:
    """Gamma along a path: exact where that is cheap, else expanded anew once the path is out of reach."""

    def __init__(self, form: Form, reach: float):
        self.form, self.reach = form, reach
        self._gone = float("inf")  # the way since the last expansion
        self._known: tuple[Tensor, ...] = ()  # log l2, and gamma and J there

    def __call__(self, log_l2: Tensor, rate: float) -> Tensor:
        """Gamma (B, G) at log l2 (B, G), from where a step of `rate` follows."""
        if self.form.exact_is_cheap or self.reach == 0:
            return self.form.determinant(log_l2.exp())[1]
        if self._gone > self.reach:
            self._known, self._gone = (log_l2, *self.form.slope(log_l2.exp())), 0.0
        self._gone += rate  # about as far as Adam goes
        at, gamma, J = self._known
        found = gamma + (J @ (log_l2 - at).unsqueeze(2)).squeeze(2)
        return torch.minimum(found.clamp(min=0), self.form.sizes)
