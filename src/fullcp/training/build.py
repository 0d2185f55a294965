"""The fastest way to run given networks together, trusted only where it gives the networks' own outputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fullcp.features.outputs import as_rows
from fullcp.features.preserve import preserved
from fullcp.training.chain import Chain
from fullcp.training.modules import Functional, Loop, stackable
from fullcp.training.stack import Stack

_PROBE_ROWS = 3
_AGREEMENT = {torch.float64: 1e-9, torch.float32: 1e-4}


def build_stack(models: Sequence[nn.Module], x: Tensor) -> Stack:
    """A stack of the networks; a few of the rows x (n, ...) are used to try it."""
    probe = x[:_PROBE_ROWS]
    return _tried(Chain, models, probe) or _tried(Functional, models, probe) or Loop(models)


def _tried(way: type[Chain] | type[Functional], models: Sequence[nn.Module], probe: Tensor) -> Stack | None:
    """The stack, if this way can run the networks."""
    try:
        if way is Functional:
            stackable(models, probe)
        stack = way(models)
        return stack if _agrees(stack, models, probe) else None
    except Exception:  # whatever the reason: torch has many ways to say so, and a slower way is left
        return None


def _agrees(stack: Stack, models: Sequence[nn.Module], probe: Tensor) -> bool:
    """Whether the stack gives the networks' outputs, the first and last network being asked, and can differentiate."""
    f = stack.predict(probe.expand(len(models), *probe.shape))
    stack.gradients(probe.expand(len(models), *probe.shape), lambda block, f: torch.ones_like(f))
    stack.grad.zero_()
    for b in {0, len(models) - 1}:
        with preserved(models[b]), torch.no_grad():
            expected = as_rows(models[b](probe), len(probe))
        share = _AGREEMENT.get(expected.dtype, 5e-2)
        if not bool((f[b] - expected).abs().amax() <= share * (expected.abs().amax() + 1e-30)):
            return False
    return True
