"""A user's module as a function from rows to rows of numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from fullcp.features.outputs import as_rows, check_row_independence
from fullcp.features.preserve import preserved, unwrap, written_tensors
from fullcp.memory import rows_within
from fullcp.sources import Inputs

_PROBE_ROWS = 6
_MOST_ROWS = 8192  # larger chunks win nothing and make progress jerky


class Network:
    """A trained module, probed once: its outputs must be rows of numbers that do not depend on one another.

    The module is never changed: see `preserved`.

    Parameters
    ----------
    model : the trained module.
    x : Tensor or StoredRows (n, ...)
        Rows to probe it with; a few, spread over the data, are used. None is kept.
    facts : what probing found before, in place of rows.
    """

    def __init__(self, model: nn.Module, x: Inputs | None = None, *, facts: dict[str, Any] | None = None):
        self.model = unwrap(model)
        if facts is None:
            assert x is not None
            self._probe(x)
        else:
            self._take(facts)

    def _probe(self, x: Inputs) -> None:
        count = min(len(x), _PROBE_ROWS)
        picks = [i * (len(x) - 1) // max(count - 1, 1) for i in range(count)]
        with torch.inference_mode(False):  # what is made in inference mode cannot be differentiated
            probe = normal(x[picks])
        self.row_shape, self._row_dtype = tuple(x.shape[1:]), x.dtype
        with preserved(self.model):
            before = [_version(tensor) for tensor in written_tensors(self.model)]
            self.outputs = check_row_independence(self.model, probe).shape[1]
            self._activation_bytes = self._measure_activations(probe) // count
            self._writes = before != [_version(tensor) for tensor in written_tensors(self.model)]
        self._examine(probe)

    def _examine(self, probe: Tensor) -> None:
        """Look at what else a kind of network needs to know."""

    def facts(self) -> dict[str, Any]:
        """What probing found, for JSON: `facts` restores the network without any row of the data."""
        return {
            "outputs": self.outputs,
            "writes": self._writes,
            "activation_bytes": self._activation_bytes,
            "row_shape": list(self.row_shape),
            "row_dtype": str(self._row_dtype).removeprefix("torch."),
        }

    def _take(self, facts: dict[str, Any]) -> None:
        self.outputs = facts["outputs"]
        self._writes = facts["writes"]
        self._activation_bytes = facts["activation_bytes"]
        self.row_shape = tuple(facts["row_shape"])
        self._row_dtype = getattr(torch, facts["row_dtype"])

    def echo(self) -> Tensor | None:
        """Outputs on made-up rows, to recognise a network by what it does; None where they are no use."""
        rows = torch.randn(3, *self.row_shape, generator=torch.Generator().manual_seed(0))
        rows = rows if self._row_dtype.is_floating_point else torch.zeros_like(rows)
        device = next((t.device for t in (*self.model.parameters(), *self.model.buffers())), rows.device)
        try:
            f = self.predict(rows.to(device, self._row_dtype)).double()
        except Exception:
            return None
        return f if torch.isfinite(f).all() else None

    def predict(self, x: Tensor) -> Tensor:
        """Outputs f (n, O) of the rows x (n, ...)."""
        with self.borrowed(), torch.no_grad():
            return as_rows(self.model(normal(x)), len(x))

    @contextmanager
    def borrowed(self) -> Iterator[nn.Module]:
        """The module in evaluation mode, left as it was afterwards: see `preserved`."""
        with preserved(self.model, writes=self._writes):
            yield self.model

    def bytes_per_row(self) -> int:
        """Memory that one row takes while it passes through."""
        return 3 * self._activation_bytes + prod(self.row_shape) * self._row_dtype.itemsize

    def rows_per_chunk(self, budget: int) -> int:
        """How many rows can be handled at once within `budget` bytes."""
        return rows_within(budget, self.bytes_per_row(), at_most=_MOST_ROWS)

    def rows_per_pass(self, budget: int) -> int:
        """How many rows can pass through at once within `budget` bytes where their gradients are not wanted."""
        return rows_within(budget, Network.bytes_per_row(self), at_most=_MOST_ROWS)

    def _measure_activations(self, probe: Tensor) -> int:
        """Bytes that autograd would keep of the probe for a backward pass."""
        kept = 0
        weights = {p.data_ptr() for p in self.model.parameters()}

        def pack(saved: Tensor) -> Tensor:
            nonlocal kept
            kept += prod(saved.shape) * saved.element_size() if saved.data_ptr() not in weights else 0
            return saved

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
            self.model(probe)
        return kept


def normal(x: Tensor) -> Tensor:
    """The tensor, or a copy if it was made in inference mode: such tensors cannot enter autograd."""
    return x.clone() if x.is_inference() else x


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
