"""A CUDA graph where there is a GPU: the steps of an epoch are recorded once and replayed without a launch each."""

from __future__ import annotations

from collections.abc import Callable

import torch

_WARM_UPS = 3  # eager calls before recording: libraries set themselves up in them


class Recorded:
    """A function without arguments or results that works on tensors which keep their places.

    On a CPU it is simply called. On a GPU it is called a few times, then recorded, then replayed; a function that
    cannot be recorded (a loss that looks at its values, a module that draws random numbers) goes on being called.
    """

    def __init__(self, function: Callable[[], None], device: torch.device):
        self.function = function
        self._graph: torch.cuda.CUDAGraph | None = None
        self._calls = 0
        self._recordable = device.type == "cuda"

    def __call__(self) -> None:
        """Do what the function does."""
        if self._graph is not None:
            self._graph.replay()
            return
        self._calls += 1
        if self._recordable and self._calls > _WARM_UPS:
            self._record()
            if self._graph is not None:
                self._graph.replay()
                return
        self.function()

    def _record(self) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):  # records, does not run
                self.function()
        except RuntimeError:
            self._recordable = False
            torch.cuda.synchronize()
            return
        self._graph = graph
