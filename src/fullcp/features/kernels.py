"""Kernels phi diag(1/l2) phi^T of a network too large for phi itself: block of rows by block of rows, tensor by tensor.

Rows that do not fit into memory are looked at again, a block at a time (`dissect`). In float64 their numbers come back
the same to some 1e-15, which matters: leverages are what is left of kernels that may be a million times as large.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fullcp.features.dissect import Block, Dissection, NotSeparableError
from fullcp.features.factors import add_kernel, operations
from fullcp.features.jacobian import Jacobian
from fullcp.features.rows import FeatureRows
from fullcp.memory import rows_within
from fullcp.progress import track

Scales = dict[str, float | Tensor]

_KEY = "kernels"
_PROBE_ROWS = 3
_MOST_POINTS = 1024
_OWN_ROWS = 16  # points whose kernels among each other are computed, for the sake of their kernels with themselves
_VECTORS = 4  # of D numbers that are about: the network in float64, its weights, the penalty, a step
_WORTH_IT = 0.5  # of the memory of phi: with more, nothing is won


def kernel_rows(features: FeatureRows, *, wanted: bool = False) -> KernelRows | None:
    """The kernels of `features` where phi of all rows exceeds the memory budget, and the network can be taken apart.

    The next call for the same `features` has the same object. Where kernels are `wanted`, they are had, or refused.
    """
    if wanted:
        try:
            return features.kept.get(_KEY) or KernelRows(features)
        except NotSeparableError as error:
            raise ValueError(
                f"model cannot be taken apart in float64, which this form of curvature needs: {error}"
            ) from error
    width = torch.finfo(features.jacobian.dtype).bits // 8
    fits = features.count * features.outputs * features.size * width <= features.memory // 2
    if fits or type(features.jacobian) is not Jacobian:
        return None
    if _KEY not in features.kept:
        try:
            rows = KernelRows(features)
        except NotSeparableError:
            rows = None
        worth_it = rows is not None and rows.bytes_per_row <= _WORTH_IT * 8 * features.outputs * features.size
        features.kept[_KEY] = rows if worth_it else None
    found: KernelRows | None = features.kept[_KEY]
    return found


class KernelRows:
    """Products of the gradients of all rows, without the gradients. n = N O rows of phi, as in the dual form.

    Parameters
    ----------
    features : the training rows; the network, the inputs and the memory budget are used, never phi.

    Attributes
    ----------
    bytes_per_row : what one row keeps.
    """

    def __init__(self, features: FeatureRows):
        self.features = features
        self.memory = features.memory - min(_VECTORS * 8 * features.size, features.memory // 2)
        self.work = self.memory // 8
        self.dissection = Dissection(features.jacobian, features.sample(_PROBE_ROWS))
        self.bytes_per_row = self.dissection.bytes_per_row
        self._held: Block | None = None
        self._kept: tuple[list[list[str]], Tensor] | None = None  # groups of tensors and their kernels

    def __getstate__(self) -> dict[str, Any]:
        """For pickles and copies: without what can be had again."""
        return {**vars(self), "_held": None, "_kept": None}

    @property
    def slices(self) -> list[slice]:
        """The blocks of training rows: all at once where half of the budget holds them, else a quarter each."""
        count = self.features.count
        size = count if self._fits else rows_within(self.memory // 4, self.bytes_per_row, at_most=count)
        return [slice(start, min(start + size, count)) for start in range(0, count, size)]

    def blocks(self) -> Iterator[tuple[slice, Block]]:
        """Each block of training rows, and its place among the n rows."""
        slices = self.slices
        for at in track(slices, "gradients", len(slices)):
            yield self._place(at), self._block(at)

    def points_within(self, budget: int) -> int:
        """How many test points to look at at a time."""
        return rows_within(budget, self.bytes_per_row, at_most=_MOST_POINTS)

    def look(self, x: Tensor, start: int | None = None) -> Block:
        """What the rows x (m, ...) keep; they are those from `start` on, for messages."""
        size = self.dissection.rows_within(self.memory // 8)
        starts = range(0, len(x), size)
        steps = track(starts, "gradients", len(starts)) if start is not None and self._fits else starts
        block: Block = {}
        for at in steps:
            rows = slice(at, min(at + size, len(x)))
            part = self.dissection(x[rows], None if start is None else start + at)
            if rows == slice(0, len(x)):
                return part
            # Into memory of its own: parts that stayed would leave holes between them, where those of the pass were.
            block = block or {name: found.room(len(x)) for name, found in part.items()}
            for name in list(part):
                block[name].take(rows, part.pop(name))  # type: ignore[arg-type]
        return block

    def scales(self, diagonal: Tensor) -> Scales:
        """What each tensor's products are multiplied with for a penalty (D,), see `add_kernel`."""
        found: Scales = {}
        for name, part in self._split(diagonal).items():
            low, high = (float(end) for end in part.aminmax())
            found[name] = 1 / low if low == high else part.rsqrt()
        return found

    def kernel(self, scales: Scales) -> Tensor:
        """K (n, n) of the training rows, its lower triangle."""
        kept, self._kept = self._kept, None
        n = self.features.count * self.features.outputs
        K = torch.zeros(n, n, dtype=torch.float64, device=self.features.x.device)
        if kept is not None and all(_one_number([scales[name] for name in names]) for names in kept[0]):
            for names, each in zip(*kept, strict=True):
                K.add_(each, alpha=scales[names[0]])  # type: ignore[arg-type]
            return K

        def add(at: slice, left: Block, others: slice, right: Block) -> None:
            for name in left:
                add_kernel(K[at, others], left[name], right[name], scales[name], self.work)

        self._over_pairs(add, "curvature")
        return K

    def kernels(self, groups: list[list[str]]) -> Tensor:
        """Phi_g phi_g^T (G, n, n) for groups g of tensors, given by their names; the next `kernel` is made of them."""
        n = self.features.count * self.features.outputs
        K = torch.zeros(len(groups), n, n, dtype=torch.float64, device=self.features.x.device)
        group = {name: g for g, names in enumerate(groups) for name in names}

        def add(at: slice, left: Block, others: slice, right: Block) -> None:
            for name in left:
                add_kernel(K[group[name], at, others], left[name], right[name], 1.0, self.work)

        self._over_pairs(add, "marginal likelihood")
        for each in K:
            upper = each.tril(-1).T
            each.tril_().add_(upper)
        self._kept = groups, K
        return K

    def cross(self, points: Block, scales: Scales) -> Tensor:
        """The kernel of the training rows with m points, (n, m O)."""
        n, O = self.features.count * self.features.outputs, self.features.outputs
        k = torch.zeros(n, _length(points) * O, dtype=torch.float64, device=self.features.x.device)
        for at, block in self.blocks():
            for name, part in points.items():
                add_kernel(k[at], block[name], part, scales[name], self.work)
        return k

    def own(self, points: Block, scales: Scales) -> Tensor:
        """The kernel of each point with itself, (m, O, O)."""
        m, O = _length(points), self.features.outputs
        blocks = []
        for at in (slice(start, min(start + _OWN_ROWS, m)) for start in range(0, m, _OWN_ROWS)):
            size = at.stop - at.start
            K = torch.zeros(size * O, size * O, dtype=torch.float64, device=self.features.x.device)
            for name, part in points.items():
                add_kernel(K, part[at], part[at], scales[name], self.work)  # two objects, so that all of K is filled
            blocks.append(K.view(size, O, size, O).diagonal(dim1=0, dim2=2).permute(2, 0, 1))
        return torch.cat(blocks)

    def push(self, v: Tensor) -> Tensor:
        """Phi v of the training rows for vectors v (D, m): (n, m)."""
        return torch.cat([self.push_points(block, v) for _, block in self.blocks()])

    def push_points(self, points: Block, v: Tensor) -> Tensor:
        """Phi v of some points: (p O, m)."""
        parts = self._split(v)
        return torch.stack([part.push(parts[name], self.work) for name, part in points.items()]).sum(0)

    def pull(self, u: Tensor) -> Tensor:
        """Phi^T u of the training rows for u (n, m): (D, m)."""
        found = u.new_zeros(self.features.size, u.shape[1])
        parts = self._split(found)
        for at, block in self.blocks():
            for name, part in block.items():
                parts[name].add_(part.pull(u[at], self.work))
        return found

    def operations(self, rows: int, others: int) -> float:
        """Multiplications for the kernel of so many rows with so many others."""
        probe = self.dissection(self.features.x[:1])
        return sum(min(operations(part, rows, others)) for part in probe.values())

    @property
    def _fits(self) -> bool:
        return self.features.count * self.bytes_per_row <= self.memory // 2

    def _place(self, at: slice) -> slice:
        return slice(at.start * self.features.outputs, at.stop * self.features.outputs)

    def _split(self, v: Tensor) -> dict[str, Tensor]:
        """The parts of vectors (D, ...) that belong to each tensor."""
        parameters = self.features.jacobian.parameters
        return dict(zip(parameters, torch.split(v, [p.numel() for p in parameters.values()]), strict=True))

    def _block(self, at: slice) -> Block:
        if self._held is not None:
            return self._held
        block = self.look(self.features.x[at], at.start)
        if self._fits:
            self._held = block
        return block

    def _over_pairs(self, add: Callable[[slice, Block, slice, Block], None], description: str) -> None:
        """Call `add` for each pair of blocks of training rows, with their places; two of them are in memory."""
        slices = self.slices
        order = [(i, j) for i in range(len(slices)) for j in (i, *range(i - 1, -1, -1))]
        left: Block = {}
        right: Block = {}
        for i, j in track(order, description, len(order)):
            if i == j:  # the last block on the left is the first to meet the new one
                left, right = {}, left
                left = self._block(slices[i])
            elif j < i - 1:
                right = {}
                right = self._block(slices[j])
            add(self._place(slices[i]), left, self._place(slices[j]), left if i == j else right)


def _one_number(scales: list[float | Tensor]) -> bool:
    return all(isinstance(scale, float) and scale == scales[0] for scale in scales)


def _length(points: Block) -> int:
    return len(next(iter(points.values())))
