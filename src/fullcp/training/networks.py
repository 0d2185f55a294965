"""The networks of the paper."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn


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
