"""The gradients of some rows in one parameter tensor, whole or in factors, and their products with those of other rows.

A layer's gradient in its weight is sum_t g_t a_t^T, over the positions t of a row (see `layers.Signal`): for a dense
layer two vectors in place of a matrix. So the kernel of two rows is, whichever takes fewer operations,

    sum_{t,t'} (g_t . g'_t') (a_t . a'_t')                in pairs of positions, or
    the product of the gradients, formed a few output channels at a time.

All tensors are float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fullcp.features.layers import Layer, patches
from fullcp.memory import rows_within

_PAIR = 16  # operations that an entry of T x T takes, multiplied and summed: it comes from memory, not from a product
_STRIPES = 8  # of a symmetric product, each as long as the diagonal needs: 9/16 of the operations
_LEAST_STRIPE = 128
_WHOLE = 2**27  # bytes of patches at a time when whole gradients are formed


@dataclass(frozen=True)
class Whole:
    """Gradients as they are.

    Attributes
    ----------
    rows : Tensor (n, O, d)
    """

    rows: Tensor

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at: slice) -> Whole:
        return Whole(self.rows[at])

    @property
    def shape(self) -> tuple[int, int, int]:
        """O, and d as units that are formed together and their size: here single entries."""
        return self.rows.shape[1], self.rows.shape[2], 1

    @property
    def bytes(self) -> int:
        """Memory."""
        return self.rows.numel() * self.rows.element_size()

    def whole(self) -> Whole:
        """The gradients as they are."""
        return self

    def formed(self, units: slice, work: int) -> Tensor:
        """Some entries of the gradients, (n O, c)."""
        return self.rows[:, :, units].flatten(0, 1)

    def push(self, v: Tensor, work: int) -> Tensor:
        """Phi v for vectors v (d, m): (n O, m)."""
        return self.rows.flatten(0, 1) @ v

    def pull(self, u: Tensor, work: int) -> Tensor:
        """Phi^T u for u (n O, m): (d, m)."""
        return self.rows.flatten(0, 1).T @ u

    def room(self, n: int) -> Whole:
        """Memory for n rows like these."""
        return Whole(_room(self.rows, n))

    def take(self, at: slice, part: Whole) -> None:
        """Copy the rows of another part to some places."""
        self.rows[at] = part.rows


@dataclass(frozen=True)
class Factors:
    """Gradients in the weight (p, q) of some layers, as what went into them and what came back.

    A weight that is used several times has the positions of all its uses.

    Attributes
    ----------
    layers : of each use.
    inputs : Tensors (n, T, q), or (n, images, channels, height, width) for a convolution
        What went in; patches are cut when they are wanted.
    g : Tensor (n, O, p, T)
    """

    layers: tuple[Layer, ...]
    inputs: tuple[Tensor, ...]
    g: Tensor

    def __len__(self) -> int:
        return len(self.g)

    def __getitem__(self, at: slice) -> Factors:
        return Factors(self.layers, tuple(x[at] for x in self.inputs), self.g[at])

    @property
    def shape(self) -> tuple[int, int, int]:
        """O, and p q as units that are formed together and their size: p rows of q."""
        return self.g.shape[1], self.g.shape[2], self.layers[0].weight[0].numel()

    @property
    def positions(self) -> int:
        """T."""
        return self.g.shape[3]

    @property
    def bytes(self) -> int:
        """Memory."""
        return sum(t.numel() * t.element_size() for t in (*self.inputs, self.g))

    def a(self, at: slice) -> Tensor:
        """What the weight saw of some rows at each position, (r, T, q)."""
        seen = [_seen(layer, x[at]) for layer, x in zip(self.layers, self.inputs, strict=True)]
        return seen[0] if len(seen) == 1 else torch.cat(seen, 1)

    def whole(self) -> Whole:
        """The gradients as they are."""
        return Whole(self.formed(slice(0, self.shape[1]), _WHOLE).view(len(self), self.shape[0], -1))

    def formed(self, units: slice, work: int) -> Tensor:
        """The gradients in some rows of the weight, (n O, p' q)."""
        O, _, q = self.shape
        found = self.g.new_empty(len(self), O * len(range(self.shape[1])[units]), q)
        for at in self._slices(work):
            g = self.g[at, :, units].flatten(1, 2)  # (r, O p', T)
            torch.bmm(g, self.a(at), out=found[at])
        return found.view(len(self) * O, -1)

    def push(self, v: Tensor, work: int) -> Tensor:
        """Phi v for vectors v (p q, m): (n O, m)."""
        O, p, q = self.shape
        found = self.g.new_empty(len(self), O, v.shape[1])
        for at in self._slices(work):
            a, g = self.a(at), self.g[at]
            for k, V in enumerate(v.T):
                z = a @ V.view(p, q).T  # (r, T, p): the change of what the layers give
                found[at, :, k] = torch.einsum("ropt,rtp->ro", g, z)
        return found.flatten(0, 1)

    def pull(self, u: Tensor, work: int) -> Tensor:
        """Phi^T u for u (n O, m): (p q, m)."""
        O, p, q = self.shape
        found = self.g.new_zeros(u.shape[1], p, q)
        for at in self._slices(work):
            a = self.a(at).flatten(0, 1)  # (r T, q)
            for k, each in enumerate(u.view(len(self), O, -1)[at].unbind(2)):
                g = torch.einsum("ropt,ro->prt", self.g[at], each)
                found[k].addmm_(g.flatten(1), a)
        return found.flatten(1).T

    @classmethod
    def merged(cls, uses: Sequence[Factors]) -> Factors:
        """One weight used several times by the same rows: its gradient is the sum over the positions of all uses."""
        if len(uses) == 1:
            return uses[0]
        layers = tuple(layer for use in uses for layer in use.layers)
        return cls(layers, tuple(x for use in uses for x in use.inputs), torch.cat([use.g for use in uses], 3))

    def room(self, n: int) -> Factors:
        """Memory for n rows like these."""
        return Factors(self.layers, tuple(_room(x, n) for x in self.inputs), _room(self.g, n))

    def take(self, at: slice, part: Factors) -> None:
        """Copy the rows of another part to some places."""
        for x, other in zip((*self.inputs, self.g), (*part.inputs, part.g), strict=True):
            x[at] = other

    def _slices(self, work: int) -> Iterator[slice]:
        """Rows whose patches fit half of the working memory."""
        yield from _slices(len(self), rows_within(work // 2, 8 * self.positions * self.shape[2], at_most=len(self)))


Part = Whole | Factors


def operations(part: Part, rows: int, others: int) -> tuple[float, float]:
    """Multiplications for the kernel of so many rows with so many others: in pairs of positions, and formed."""
    O, units, size = part.shape
    formed = float(rows * others * O**2 * units * size)
    if isinstance(part, Whole):
        return float("inf"), formed
    T = part.positions
    pairs = float(rows * others * T**2 * (size + O**2 * (units + _PAIR)))
    return pairs, formed + (rows + others) * O * T * units * size


def add_kernel(out: Tensor, left: Part, right: Part, scale: float | Tensor, work: int) -> None:
    """Add phi diag(scale) phi'^T to out (n O, n' O).

    Where the rows are the same ones (`left is right`), what lies above the diagonal may be left out.

    Parameters
    ----------
    scale : 1 / l2, one number, or its root for each parameter of the tensor (d,).
    work : bytes for what is held on the way.
    """
    pairs, formed = operations(left, len(left), len(right))
    if isinstance(scale, float) and pairs < formed:
        assert isinstance(left, Factors)
        assert isinstance(right, Factors)
        _add_pairs(out, left, right, scale, work // 2)
        return
    O, units, size = left.shape
    together = rows_within(work // 2, 8 * O * size * (len(left) + len(right)), at_most=units)
    for at in _slices(units, together):
        columns = slice(at.start * size, at.stop * size)
        P = left.formed(at, work // 2)
        Q = P if left is right else right.formed(at, work // 2)
        if isinstance(scale, Tensor):
            P = P * scale[columns]
            Q = P if left is right else Q * scale[columns]
        _add_product(out, P, Q, scale if isinstance(scale, float) else 1.0)


def _add_product(out: Tensor, P: Tensor, Q: Tensor, scale: float) -> None:
    """Add P Q^T; of a symmetric product, no more than stripes that hold the lower triangle."""
    length = len(P) if P is not Q else max(_LEAST_STRIPE, -(-len(P) // _STRIPES))
    for at in _slices(len(P), length):
        end = at.stop if P is Q else len(Q)
        out[at, :end].addmm_(P[at], Q[:end].T, alpha=scale)


def _add_pairs(out: Tensor, left: Factors, right: Factors, scale: float, work: int) -> None:
    """Add the kernel by pairs of positions, in tiles of rows x rows."""
    O, p, q = left.shape
    T, n, m = left.positions, len(left), len(right)
    tile = max(1, int((work / (16 * T**2)) ** 0.5))
    tile = min(tile, rows_within(work // 2, 8 * T * (q + O * p), at_most=tile))
    K = out.view(n, O, m, O)
    for rows in _slices(n, tile):
        a, g = left.a(rows).flatten(0, 1), left.g[rows].transpose(2, 3)  # (r T, q), (r, O, T, p)
        for others in _slices(m, tile):
            if left is right and others.start >= rows.stop:
                break
            b, h = right.a(others).flatten(0, 1), right.g[others].transpose(2, 3)
            A = a @ b.T  # (r T, s T)
            for o in range(O):
                go = g[:, o].flatten(0, 1)  # (r T, p)
                for k in range(O):
                    both = (go @ h[:, k].flatten(0, 1).T).mul_(A)
                    if T > 1:
                        both = both.view(len(both) // T, T, -1, T).sum((1, 3))
                    K[rows, o, others, k].add_(both, alpha=scale)


def _room(t: Tensor, n: int) -> Tensor:
    return t.new_empty(n, *t.shape[1:])


def _seen(layer: Layer, x: Tensor) -> Tensor:
    """What the weight of a layer saw of the rows x at each position, (r, T, q)."""
    if isinstance(layer, nn.Linear):
        return x
    return patches(layer, x.flatten(0, 1)).reshape(len(x), -1, layer.weight[0].numel())


def _slices(count: int, length: int) -> Iterator[slice]:
    for start in range(0, count, length):
        yield slice(start, min(start + length, count))
