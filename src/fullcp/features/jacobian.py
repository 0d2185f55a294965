"""phi(x): the gradient of a network's outputs in its trainable parameters, for any nn.Module."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from fullcp.features.gradients import (
    FunctionalGradients,
    Gradients,
    LinearGradients,
    LoopGradients,
    NotLinearError,
    Parameters,
)
from fullcp.features.network import Network, normal
from fullcp.features.preserve import parameters_by_name, preserved
from fullcp.memory import rows_within
from fullcp.sources import Inputs

# What two ways to the same gradient may differ by, relative to the largest entry; above it one of them is wrong.
_AGREEMENT = {torch.float64: 1e-9, torch.float32: 1e-4}
_AGREEMENT_HALF = 5e-2
_PROBE_BYTES = 2**27  # what the gradients of rows to probe with may take, unless there are two
_WAYS: list[type[LinearGradients] | type[FunctionalGradients] | type[LoopGradients]] = [
    LinearGradients,
    FunctionalGradients,
    LoopGradients,
]


class Jacobian(Network):
    """Outputs and per-row gradients of a model, computed the fastest way that gives the right numbers.

    The way is chosen once, on a few rows: linear layers or torch.func are trusted only where plain autograd, one row at
    a time, confirms them; where neither is, that loop itself serves.

    Parameters
    ----------
    model : the trained network; only parameters with requires_grad count.
    x : Tensor or StoredRows (n, ...)
        Rows to probe the model with; a few, spread over the data, are used.
    facts : what probing found before, in place of rows.
    only : names of parameters
        Of those with requires_grad, just these count.

    Examples
    --------
    >>> net = torch.nn.Linear(3, 1)
    >>> jacobian = Jacobian(net, torch.randn(8, 3))
    >>> f, phi = jacobian(torch.ones(2, 3))
    >>> phi[0].tolist()  # the inputs, and 1 for the bias
    [[1.0, 1.0, 1.0, 1.0]]
    """

    def __init__(
        self,
        model: nn.Module,
        x: Inputs | None = None,
        *,
        facts: dict[str, Any] | None = None,
        only: Collection[str] | None = None,
    ):
        self._only = only
        super().__init__(model, x, facts=facts)

    def _examine(self, probe: Tensor) -> None:
        named = parameters_by_name(self.model).items()
        self._trainable = [name for name, p in named if p.requires_grad and (self._only is None or name in self._only)]
        most = max(2, rows_within(_PROBE_BYTES, 8 * self.outputs * self.size, at_most=len(probe)))
        with preserved(self.model, self._trainable):
            self._gradients = self._choose(probe[:most])

    def facts(self) -> dict[str, Any]:
        """What probing found, with the way and the names of the parameters that count."""
        return {**super().facts(), "way": self.way, "trainable": self._trainable}

    def _take(self, facts: dict[str, Any]) -> None:
        super()._take(facts)
        self._trainable = facts["trainable"]
        self._gradients = {way.name: way for way in _WAYS}[facts["way"]](self.model, self.parameters)

    @property
    def parameters(self) -> Parameters:
        """The parameters that were trainable when the network was probed, whatever they are now."""
        found = parameters_by_name(self.model)
        return {name: found[name] for name in self._trainable}

    @property
    def size(self) -> int:
        """D, the number of parameters that count."""
        return sum(p.numel() for p in self.parameters.values())

    @property
    def dtype(self) -> torch.dtype:
        """Of phi."""
        return reduce(torch.promote_types, (p.dtype for p in self.parameters.values()))

    @property
    def way(self) -> str:
        """How the gradients are computed, in words."""
        return self._gradients.name

    @contextmanager
    def borrowed(self) -> Iterator[nn.Module]:
        """The model, ready to be differentiated in the parameters that count, and left as it was afterwards."""
        with preserved(self.model, self._trainable, writes=self._writes):
            yield self.model

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs f (n, O) and gradients phi (n, O, D) of the rows x (n, ...)."""
        with self.borrowed():
            try:
                return self._gradients(normal(x))
            except NotLinearError:  # the rows probed did not show all that the network does
                return LoopGradients(self.model, self.parameters)(normal(x))

    def bytes_per_row(self) -> int:
        """Memory of one row: phi, its parts before they are put together, and its float64 copy."""
        width = torch.finfo(self.dtype).bits // 8
        passes = self.outputs if self.way == FunctionalGradients.name else 1  # vmap runs all outputs side by side
        return passes * super().bytes_per_row() + self.outputs * self.size * (2 * width + 8)

    def locate(self, column: int) -> str:
        """Name the parameter entry behind a column of phi."""
        for name, parameter in self.parameters.items():
            if column < parameter.numel():
                index: list[int] = []
                for extent in reversed(parameter.shape):
                    index.insert(0, column % extent)
                    column //= extent
                return f"{name}{index}"
            column -= parameter.numel()
        raise IndexError(column)

    def _choose(self, probe: Tensor) -> Gradients:
        """The fastest way that plain autograd confirms, in the rows' order and against it."""
        truth = LoopGradients(self.model, self.parameters)
        expected = truth(probe)[1]
        if not torch.isfinite(expected).all():
            raise ValueError("model has NaN or infinite gradients at its outputs")
        for way in (LinearGradients, FunctionalGradients):
            try:
                candidate = way(self.model, self.parameters)
                # One after the other: of a large network, gradients of two rows take a good deal.
                agree = self._agree(candidate(probe)[1], expected)
                agree = agree and self._agree(candidate(probe.flip(0))[1], expected.flip(0))
            except Exception:
                continue
            if agree:
                return candidate
        return truth

    def _agree(self, found: Tensor, expected: Tensor) -> bool:
        """Whether two gradients (n, O, D) are the same to rounding, parameter by parameter."""
        if found.shape != expected.shape:
            return False
        share = _AGREEMENT.get(expected.dtype, _AGREEMENT_HALF)
        floor = 100 * torch.finfo(expected.dtype).eps * expected.abs().amax()
        sizes = [p.numel() for p in self.parameters.values()]
        pairs = zip(torch.split(found, sizes, 2), torch.split(expected, sizes, 2), strict=True)
        return all(bool((a - b).abs().amax() <= share * b.abs().amax() + floor) for a, b in pairs)
