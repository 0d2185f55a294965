"""Test points in groups, each with the training rows that can matter to any point of it (`pruning`).

A group shares its products, so a large one is cheaper a point, as long as its points want nearly the same rows. The
same order statistic of many points does where leverages are alike. A label wants the rows near it, whose number hardly
depends on N; the more training rows lie between two labels, the less these share, and the smaller a group has to be.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fullcp.pruning import SortedRows, Surroundings, Window

_Number = TypeVar("_Number", int, float)
_Rows = TypeVar("_Rows", Window, Surroundings)

# Test points at a time: of like leverage, so that one window serves them, and enough for products at full speed.
_GROUP = {"cpu": 128, "cuda": 512}
_LIKE_LEVERAGES = 1024  # for labels: points of like leverage, and of these some with near labels
_LIKE_LABELS = {"cpu": 32, "cuda": 256}
_LARGEST_SHARE = 0.5  # of the rows: above, all of them in their order are had faster than those that remain
# What a group takes, in numbers of a training row fetched: itself, and each test point's product with such a number.
_OVERHEAD, _PRODUCT = {"cpu": 2e5, "cuda": 2e8}, {"cpu": 0.1, "cuda": 0.02}
_PARTS = 4  # a group is divided into


def groups_by_rank(
    rows: SortedRows, h: Tensor, ranks: list[int], memory: int
) -> Iterator[tuple[Tensor, Window | None]]:
    """Groups of test points of leverages h (m,), with the rows that can have one of the ranks; None is all rows."""
    order = torch.split(h.argsort(), _of(_GROUP, h))
    leverages = torch.stack([h[torch.stack([group[0], group[-1]])] for group in order]).tolist()
    windows = rows.windows([(low, high) for low, high in leverages], ranks, memory)
    for group, window in zip(order, windows, strict=True):
        yield group, _worthwhile(rows, window)


def groups_by_label(
    rows: SortedRows, h: Tensor, least: Tensor, most: Tensor, width: int, memory: int
) -> Iterator[tuple[Tensor, Surroundings | None]]:
    """Groups of test points with the rows whose changepoints r_i / (1 + h) can lie in [least, most], (m,) each.

    Groups whose parts want far fewer rows are divided, by what products, rows and groups take: `width` numbers a row.
    """
    overhead, product = _of(_OVERHEAD, h), _of(_PRODUCT, h)

    def found(groups: list[Tensor]) -> list[tuple[Tensor, Surroundings]]:
        """Groups may be of several sizes: the last label of small ones is repeated."""
        points = pad_sequence(groups, batch_first=True, padding_value=-1)
        last = torch.stack([group[-1] for group in groups]).unsqueeze(1)
        points = torch.where(points < 0, last, points)
        leverages = torch.stack(h[points].aminmax(dim=1), dim=1)
        low = least[points].flip(1).cummin(1).values.flip(1).contiguous()  # rounding may have changed their order
        around = rows.around(leverages, low, most[points].cummax(1).values, memory)
        return [(g, Surroundings(a.rows, a.below[: len(g)])) for g, a in zip(groups, around, strict=True)]

    def cost(group: Tensor, around: Surroundings) -> float:
        return overhead + width * len(around.rows) * (1 + product * len(group))

    pairs = found(
        [
            group
            for alike in torch.split(h.argsort(), _LIKE_LEVERAGES)
            for group in torch.split(alike[least[alike].argsort()], _of(_LIKE_LABELS, h))
        ]
    )
    while pairs:
        divided: list[tuple[Tensor, Surroundings, int]] = []
        parts: list[Tensor] = []
        for group, around in pairs:
            size = -(-len(group) // _PARTS)
            # At best, the parts hold no row twice, and spare only products; each takes its overhead.
            spared = width * len(around.rows) * product * (len(group) - size)
            if len(group) > 1 and spared > (_PARTS - 1) * overhead:
                divided.append((group, around, -(-len(group) // size)))
                parts += torch.split(group, size)
            else:
                yield group, _worthwhile(rows, around)
        of_parts, pairs = iter(found(parts) if parts else []), []
        for group, around, count in divided:
            instead = list(islice(of_parts, count))
            if sum(cost(*pair) for pair in instead) < cost(group, around):
                pairs += instead
            else:
                yield group, _worthwhile(rows, around)


def _worthwhile(rows: SortedRows, window: _Rows) -> _Rows | None:
    return None if len(window.rows) > _LARGEST_SHARE * len(rows.e) else window


def _of(table: dict[str, _Number], tensor: Tensor) -> _Number:
    """The entry for a tensor's device."""
    return table.get(tensor.device.type, table["cpu"])
