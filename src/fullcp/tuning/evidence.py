"""The Laplace log marginal likelihood with Gaussian noise, as a function of prior precisions and noise.

With S = sum_i phi_i phi_i^T, n = N O observations, noise variance v and one prior precision d_g for each group g of D_g
parameters,

    log p(y) = -n/2 log(2 pi v) - |e|^2 / (2 v) + 1/2 sum_g (D_g log d_g - d_g |theta_g|^2) - 1/2 log det A
    A        = S / v + diag(d)

and its gradient in log d_g and log v needs only the effective number of parameters of each group,
gamma_g = D_g - d_g tr_g(A^-1):

    d / d log d_g = 1/2 (gamma_g - d_g |theta_g|^2)
    d / d log v   = 1/2 (|e|^2 / v - n + sum_g gamma_g)

`fullcp.tuning.forms` has log det A and gamma, for every structure of S, in the terms of the predictors: l2 = v d and
H = S + diag(l2) = v A. B networks are evaluated at once, each with precisions and noise of its own; where H is singular
in float64, value and gradient of that network are NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log, pi

import torch
from torch import Tensor

from fullcp.tuning.forms import Form

# Precisions and variances are looked for from exp(-16) to exp(16): wide enough for standardised data, narrow enough for
# float64.
BOUND = 16.0


@dataclass(frozen=True)
class Value:
    """The log marginal likelihood (B,) and its gradient in the logarithms of precisions (B, G) and variances (B,)."""

    value: Tensor
    in_log_precision: Tensor
    in_log_variance: Tensor


class Evidence:
    """The log marginal likelihood of B networks, each on the rows it was trained on, in float64.

    Parameters
    ----------
    form : S of the networks.
    squares : Tensor (B, G)
        |theta_g|^2, the weights of each group.
    squared_error : Tensor (B,)
        |e|^2, the residuals y - f.
    observations : Tensor (B,)
        n = N O.
    """

    def __init__(self, form: Form, squares: Tensor, squared_error: Tensor, observations: Tensor):
        self.form = form
        self.squares = squares
        self.squared_error = squared_error
        self.observations = observations

    @property
    def groups(self) -> int:
        """G, the number of precisions."""
        return len(self.form.sizes)

    def __call__(self, log_precision: Tensor, log_variance: Tensor) -> Value:
        """Value and gradient at log precisions (B, G) and log noise variances (B,)."""
        log_det, gamma = self.form.determinant(penalty(log_precision, log_variance))
        value = self._value(log_precision, log_variance, log_det)
        return Value(value, *self.gradient(log_precision, log_variance, gamma))

    def value(self, log_precision: Tensor, log_variance: Tensor) -> Tensor:
        """The value (B,) alone."""
        return self._value(log_precision, log_variance, self.form.log_det(penalty(log_precision, log_variance)))

    def gradient(self, log_precision: Tensor, log_variance: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient in log precisions (B, G) and log variances (B,), for effective parameters gamma (B, G)."""
        in_log_precision = (gamma - log_precision.exp() * self.squares) / 2
        return in_log_precision, (self.squared_error / log_variance.exp() - self.observations + gamma.sum(1)) / 2

    def _value(self, log_precision: Tensor, log_variance: Tensor, log_det: Tensor) -> Tensor:
        """The value (B,), for log det H (B,)."""
        sizes = self.form.sizes
        fit = self.observations * (log(2 * pi) + log_variance) + self.squared_error / log_variance.exp()
        prior = log_precision @ sizes - (log_precision.exp() * self.squares).sum(1)
        return (prior - fit - (log_det - sizes.sum() * log_variance)) / 2  # A is H / v


def penalty(log_precision: Tensor, log_variance: Tensor) -> Tensor:
    """l2 = v d, (B, G)."""
    return torch.exp(log_precision + log_variance.unsqueeze(1))
