"""A user's module as a function from rows to rows of numbers."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor, nn

from fullcp.features.outputs import as_rows, check_row_independence
from fullcp.features.preserve import preserved
from fullcp.memory import rows_within

_PROBE_ROWS = 6
_MOST_ROWS = 8192  # larger chunks win nothing and make progress jerky


class Network:
    """A trained module, probed once: its outputs must be rows of numbers that do not depend on one another.

    The module is never changed: see `preserved`.

    Parameters
    ----------
    model : the trained module.
    x : Tensor (n, ...)
        Rows to probe it with; a few, spread over the data, are used.
    """

    def __init__(self, model: nn.Module, x: Tensor):
        self.model: nn.Module = getattr(model, "_orig_mod", model)  # a compiled module hides the one with the layers
        count = min(len(x), _PROBE_ROWS)
        picks = [i * (len(x) - 1) // max(count - 1, 1) for i in range(count)]
        with torch.inference_mode(False):  # what is made in inference mode cannot be differentiated
            self.probe = normal(x[picks])
        with preserved(self.model):
            self.outputs = check_row_independence(self.model, self.probe).shape[1]
            self._activation_bytes = self._measure_activations() // len(self.probe)

    def predict(self, x: Tensor) -> Tensor:
        """Outputs f (n, O) of the rows x (n, ...)."""
        with preserved(self.model), torch.no_grad():
            return as_rows(self.model(normal(x)), len(x))

    def bytes_per_row(self) -> int:
        """Memory that one row takes while it passes through."""
        return 3 * self._activation_bytes + self.probe[0].numel() * self.probe.element_size()

    def rows_per_chunk(self, budget: int) -> int:
        """How many rows can be handled at once within `budget` bytes."""
        return rows_within(budget, self.bytes_per_row(), at_most=_MOST_ROWS)

    def _measure_activations(self) -> int:
        """Bytes that autograd would keep of the probe for a backward pass."""
        kept = 0

        def pack(saved: Tensor) -> Tensor:
            nonlocal kept
            kept += prod(saved.shape) * saved.element_size()
            return saved

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
            self.model(self.probe)
        return kept


def normal(x: Tensor) -> Tensor:
    """The tensor, or a copy if it was made in inference mode: such tensors cannot enter autograd."""
    return x.clone() if x.is_inference() else x
