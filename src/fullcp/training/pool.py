"""The rows of all networks in one place on the device, and which of them belong to whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fullcp.features import Network
from fullcp.inputs import ModelTraits, check_outputs, model_traits, read_rows


@dataclass(frozen=True)
class Pool:
    """Rows x (R, ...) with targets y (R, K); network b has `counts[b]` of them, at `rows[b]` (B, width).

    What stands in `rows` beyond a network's count is some valid place.
    """

    x: Tensor
    y: Tensor
    rows: Tensor
    counts: Tensor

    @property
    def width(self) -> int:
        """The most rows of a network."""
        return self.rows.shape[1]

    @property
    def ragged(self) -> bool:
        """Whether some network has fewer rows."""
        return bool((self.counts < self.width).any())

    def keep(self, which: Tensor) -> Pool:
        """The pool for some of the networks."""
        return Pool(self.x, self.y, self.rows[which], self.counts[which])


def read_pool(
    models: Sequence[nn.Module], data: Any, *, same_shape: bool, name: str = "data", like: Pool | None = None
) -> Pool:
    """Check the data of each network and put them together.

    Parameters
    ----------
    models : networks of one architecture.
    data : a pair (X, y) or a DataLoader that all networks share, or a list of one a network
    same_shape : whether the targets must have a column an output.
    like : a pool whose rows and targets have the shape that is wanted.
    """
    traits = _common_traits(models)
    pairs = pairs_of(data, len(models), name)
    offsets: dict[tuple[int, int], tuple[int, int]] = {}  # a pair -> where its rows begin, and how many there are
    xs: list[Tensor] = []
    ys: list[Tensor] = []
    total = 0
    expected = None if like is None else (tuple(like.x.shape[1:]), like.y.shape[1])
    shared = len({(id(X), id(y)) for X, y in pairs}) == 1
    for b, (X, y) in enumerate(pairs):
        key = (id(X), id(y))
        if key in offsets:
            continue
        own = "" if shared else f" of network {b}"
        rows = read_rows(X, y, traits, x_name=f"X{own}", y_name=f"y{own}")
        assert rows.y is not None
        shapes = (tuple(rows.x.shape[1:]), rows.y.shape[1])
        expected = expected or shapes
        if shapes != expected:
            raise ValueError(
                f"{name}: X{own} has rows of shape {shapes[0]} with {shapes[1]} target(s) each, others {expected[0]} "
                f"with {expected[1]}"
            )
        if not xs:
            outputs = Network(models[0], rows.x).outputs
        if same_shape:
            check_outputs(outputs, rows.y, f"y{own}")
        xs.append(rows.tensor())
        ys.append(rows.y.to(traits.dtype))
        offsets[key] = (total, len(rows.x))
        total += len(rows.x)
    spans = [offsets[id(X), id(y)] for X, y in pairs]
    counts = torch.tensor([count for _, count in spans], device=traits.device)
    starts = torch.tensor([start for start, _ in spans], device=traits.device)
    place = torch.arange(int(counts.max()), device=traits.device)
    rows_of = starts.unsqueeze(1) + place.minimum(counts.unsqueeze(1) - 1)
    return Pool(torch.cat(xs), torch.cat(ys), rows_of, counts)


def pairs_of(data: Any, networks: int, name: str) -> list[tuple[Any, Any]]:
    """One pair a network; a DataLoader stands for its inputs and targets, and is the first of its pair."""
    if isinstance(data, DataLoader):
        return [(data, None)] * networks
    if not isinstance(data, (tuple, list)) or not data:
        raise TypeError(
            f"{name} must be a pair (X, y) or a DataLoader, or a list of one of these a network, got "
            f"{type(data).__name__}"
        )
    if isinstance(data, tuple) and len(data) == 2 and not all(isinstance(part, DataLoader) for part in data):
        return [data] * networks
    if len(data) != networks:
        raise ValueError(f"{name} must be one pair (X, y) a network: there are {networks} networks, {len(data)} pairs")
    pairs = [(pair, None) if isinstance(pair, DataLoader) else pair for pair in data]
    for b, pair in enumerate(pairs):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError(f"{name}[{b}] must be a pair (X, y) or a DataLoader, got {type(pair).__name__}")
    return [(pair[0], pair[1]) for pair in pairs]


def _common_traits(models: Sequence[nn.Module]) -> ModelTraits:
    traits = [model_traits(model) for model in models]
    if any(trait != traits[0] for trait in traits):
        raise ValueError("models must share one device and dtype")
    shapes = [[tuple(p.shape) for p in model.parameters() if p.requires_grad] for model in models]
    for b, found in enumerate(shapes):
        if found != shapes[0]:
            raise ValueError(f"models must be of one architecture: model {b} has other parameters than model 0")
    return traits[0]
