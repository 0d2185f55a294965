"""The networks of the paper."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from fullcp.features.preserve import BORROWING


def mlp(
    inputs: int,
    hidden: Sequence[int] = (50,),
    outputs: int = 1,
    activation: Callable[[], nn.Module] = nn.GELU,
) -> nn.Sequential:
    """Linear layers with an activation between them; by default the paper's network for small data sets.

    Examples
    --------
    >>> mlp(6)
    Sequential(
      (0): Linear(in_features=6, out_features=50, bias=True)
      (1): GELU(approximate='none')
      (2): Linear(in_features=50, out_features=1, bias=True)
    )
    """
    layers: list[nn.Module] = []
    width = inputs
    for size in hidden:
        layers += [nn.Linear(width, size), activation()]
        width = size
    return nn.Sequential(*layers, nn.Linear(width, outputs))


def replicate(make: Callable[[], nn.Module], seeds: Sequence[int]) -> list[nn.Module]:
    """Networks of one architecture with initial weights from the given seeds; torch's own state is left alone.

    Examples
    --------
    >>> models = replicate(lambda: mlp(6), range(100))
    >>> len(models)
    100
    """
    models = []
    for seed in seeds:
        # The generator belongs to all threads; who borrows a network puts it back to what it was, and so waits too.
        with BORROWING, torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            torch.manual_seed(seed)
            models.append(make())
    return models
