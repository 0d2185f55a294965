"""The order of the rows: a permutation a network and epoch that depends on the network's seed and on nothing else.

Random numbers come from a counter (seed, epoch, row) by the mixing function of SplitMix64, not from a generator's
state: a network meets its rows in the same order alone or among others, on any device, after an interruption too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from fullcp.features.preserve import BORROWING

_FACTOR = -0x40A7B892E31B1A47


def permutations(seeds: Tensor, epoch: int, counts: Tensor, width: int, *, ragged: bool = True) -> Tensor:
    """A random order of 0 ... counts[b] - 1 for each network, (B, width); what follows are the places beyond.

    Parameters
    ----------
    seeds, counts : Tensor (B,), int64
    width : the largest count.
    ragged : whether some count is smaller.

    Examples
    --------
    >>> permutations(torch.tensor([0, 1]), 0, torch.tensor([4, 3]), 4).tolist()
    [[0, 2, 3, 1], [2, 1, 0, 3]]
    """
    place = torch.arange(width, device=seeds.device)
    stream = _mixed(_mixed(seeds) + epoch)  # (B,)
    z = stream.unsqueeze(1) + _mixed(place)
    z.bitwise_xor_(_shifted(z, 32)).mul_(_FACTOR)  # its high bits depend on all bits, and they alone count
    bits = max(1, (width - 1).bit_length())
    # The place goes into the low bits: sorting the keys sorts the places, and equal keys cannot be.
    keys = _shifted(z, bits + 2).bitwise_left_shift_(bits).bitwise_or_(place)  # 62 bits
    if ragged:
        keys = torch.where(place < counts.unsqueeze(1), keys, (1 << 62) + place)
    if keys.device.type == "cpu":
        keys.numpy().sort(axis=1)
    else:
        keys = keys.sort(dim=1).values
    keys.bitwise_and_((1 << bits) - 1)
    return torch.where(place < counts.unsqueeze(1), keys, place) if ragged else keys


def _mixed(z: Tensor) -> Tensor:
    """The output function of SplitMix64, in wrapping 64-bit arithmetic."""
    z = z + -0x61C8864680B583EB
    z = (z ^ _shifted(z, 30)) * _FACTOR
    z = (z ^ _shifted(z, 27)) * -0x6B2FB644ECCEEE15
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, bits: int) -> Tensor:
    """The logical shift to the right: torch's keeps the sign."""
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)


@contextmanager
def drawing(seed: int, epoch: int, device: torch.device) -> Iterator[None]:
    """What layers such as dropout draw in here depends on seed and epoch alone; torch's own state is left alone."""
    stream = int(_mixed(_mixed(torch.tensor(seed)) + epoch))
    # The generator belongs to all threads; who borrows a network puts it back to what it was, and so waits too.
    with BORROWING, torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(stream)  # torch.manual_seed would touch the generators of all devices
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(stream)
        yield


@dataclass(frozen=True)
class Step:
    """One batch of every network: columns `start` to `stop` of the permuted rows.

    Attributes
    ----------
    sizes : Tensor (B,), how many of the columns belong to each network's batch; None where all do for all networks.
    """

    start: int
    stop: int
    sizes: Tensor | None


def plan(counts: Tensor, batch_size: int) -> list[Step]:
    """The steps of an epoch for networks with `counts` (B,) rows.

    The last batch is smaller; a last row alone joins the batch before, since BatchNorm cannot train on one row.
    """
    whole = torch.div(counts + batch_size - 1, batch_size, rounding_mode="floor")
    lonely = (counts % batch_size == 1) & (counts > 1) & (batch_size > 1)
    batches = whole - lonely.long()
    steps = []
    for k in range(int(batches.max())):
        last = batches == k + 1
        sizes = torch.where(last, counts - k * batch_size, torch.where(batches > k + 1, batch_size, 0))
        width = int(sizes.max())
        even = bool((sizes == width).all())
        steps.append(Step(k * batch_size, k * batch_size + width, None if even else sizes))
    return steps
