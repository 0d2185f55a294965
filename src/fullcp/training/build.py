"""The fastest way to run given networks together, trusted only where it gives the networks' own outputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fullcp.features.outputs import as_rows
from fullcp.features.preserve import preserved
from fullcp.training.chain import Chain
from fullcp.training.modules import Functional, Loop, stackable
from fullcp.training.shuffling import drawing
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
    """Whether the stack gives the outputs of each network, and can differentiate.

    Each is asked: they may differ in what is no weight, a slope or a function among their attributes.
    """
    f = stack.predict(probe.expand(len(models), *probe.shape))
    with drawing(0, 0, probe.device):  # torch's own random numbers are the user's
        stack.gradients(probe.expand(len(models), *probe.shape), lambda block, f: torch.ones_like(f))
    stack.grad.zero_()
    places: dict[int, list[int]] = {}  # of one module; a stack may hold it many times
    for b, model in enumerate(models):
        places.setdefault(id(model), []).append(b)
    firsts = [found[0] for found in places.values()]
    one = torch.empty(len(models), dtype=torch.long)
    for place, found in enumerate(places.values()):
        one[found] = place
    with preserved(nn.ModuleList([models[b] for b in firsts])), torch.no_grad():
        expected = torch.stack([as_rows(models[b](probe), len(probe)) for b in firsts])[one.to(probe.device)]
    share = _AGREEMENT.get(expected.dtype, 5e-2)
    size = expected.abs().amax((1, 2))
    return bool(((f - expected).abs().amax((1, 2)) <= share * (size + 1e-30)).all())
