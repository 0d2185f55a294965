"""One thread for small steps: handing them out to several costs more than they do, far more on a busy machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Multiply-adds of a forward pass. An activation of 256 x 50 takes 8 microseconds on one thread and, where the machine
# withholds the second core for a moment, up to 8 milliseconds on two: the demo then took 57 to 276 s instead of 10.
_SMALL = 10_000_000


@contextmanager
def one_thread_if_small(multiply_adds: int) -> Iterator[None]:
    """Limit torch to one thread for a while if a step is small; the number is as before afterwards."""
    before = torch.get_num_threads()
    if multiply_adds > _SMALL or before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
