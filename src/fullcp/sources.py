"""Rows that stay in a file: cut out, converted and moved to the model's device some at a time."""

from __future__ import annotations

import errno
import tempfile
import warnings
from collections.abc import Callable, Iterator
from mmap import mmap
from typing import IO, Any, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import Self

from fullcp.memory import rows_within

_CHUNK = 2**24  # bytes to convert at a time
T = TypeVar("T")


class StoredRows:
    """N rows in a mapped file, of which slices and lists of indices are had as tensors in memory.

    Nothing is written to the file, and no tensor that is handed out shares memory with it.

    Parameters
    ----------
    stored : array, or tensor on the CPU, (N, ...)
        Mapped from a file, in any numeric dtype and layout.
    dtype, device
        Of the tensors.

    Examples
    --------
    >>> rows = StoredRows(np.arange(6).reshape(3, 2), torch.float32, torch.device("cpu"))
    >>> rows[1:], len(rows), rows.shape
    (tensor([[2., 3.],
            [4., 5.]]), 3, (3, 2))
    """

    def __init__(self, stored: NDArray[Any] | Tensor, dtype: torch.dtype, device: torch.device):
        self._stored = stored if isinstance(stored, Tensor) else np.asarray(stored)
        self.dtype, self.device = dtype, device
        self.shape = tuple(stored.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice | list[int]) -> Tensor:
        return self.as_stored(rows).to(self.device, self.dtype)

    def as_stored(self, rows: slice | list[int]) -> Tensor:
        """The rows in the dtype that the file has them in, on the CPU."""
        if isinstance(self._stored, Tensor):
            return self._stored[rows].clone()
        return tensor_of(np.array(self._stored[rows], order="C"))

    def chunks(self, memory: int) -> Iterator[slice]:
        """All rows in order, as many at a time as take `memory` bytes as they are stored."""
        one = self.as_stored(slice(0, 1))
        size = rows_within(memory, one.numel() * one.element_size(), at_most=max(1, len(self)))
        for start in range(0, len(self), size):
            yield slice(start, min(start + size, len(self)))

    def mapped(self) -> Tensor:
        """All rows as one tensor on the CPU that a file lies behind, for who only reads it; it takes no memory."""
        if isinstance(self._stored, Tensor):
            return self._stored
        flags = self._stored.flags
        if flags.c_contiguous and flags.aligned and str(self._stored.dtype) == str(self.dtype).removeprefix("torch."):
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
                return torch.from_numpy(self._stored)
        collected = Collected(0, "X", self.device)
        for rows in self.chunks(_CHUNK):
            collected.add(self.as_stored(rows).to(self.dtype))
        return collected.mapped()

    def __deepcopy__(self, memo: object) -> Self:
        return self  # nobody writes to it

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError(
            "rows in a file (of a memory-mapped array, or of a DataLoader that did not fit into memory) cannot be "
            "pickled: use save(path) and load(path, model), or pass the rows in memory; copy.deepcopy shares the file"
        )


class JoinedRows(StoredRows):
    """Two sets of rows one after the other, either or both in files, as one; asked for in ascending order.

    Examples
    --------
    >>> rows = JoinedRows(torch.zeros(2, 1), torch.ones(3, 1))
    >>> rows[1:3].tolist(), rows[::2].tolist(), len(rows)
    ([[0.0], [1.0]], [[0.0], [1.0], [1.0]], 5)
    """

    def __init__(self, first: Tensor | StoredRows, second: Tensor | StoredRows):
        self._parts, self._cut = (first, second), len(first)
        self.dtype, self.device = first.dtype, first.device
        self.shape = (len(first) + len(second), *first.shape[1:])

    def __getitem__(self, rows: slice | list[int]) -> Tensor:
        return torch.cat([part[at] for part, at in zip(self._parts, self._parted(rows), strict=True)])

    def as_stored(self, rows: slice | list[int]) -> Tensor:
        """The rows in the dtype of the network, on the CPU: that of the files need not be one."""
        return self[rows].cpu()

    def mapped(self) -> Tensor:
        """All rows as one tensor in memory."""
        return torch.cat([as_tensor(part).to(self.device, self.dtype) for part in self._parts])

    def _parted(self, rows: slice | list[int]) -> tuple[Any, Any]:
        """What is asked of each part; the first part's rows come first."""
        if isinstance(rows, slice) and rows.step in (None, 1):
            start, stop, _ = rows.indices(len(self))
            cut = self._cut
            return slice(min(start, cut), min(stop, cut)), slice(max(start - cut, 0), max(stop - cut, 0))
        picks = list(range(*rows.indices(len(self)))) if isinstance(rows, slice) else rows
        return [i for i in picks if i < self._cut], [i - self._cut for i in picks if i >= self._cut]


Inputs: TypeAlias = Tensor | StoredRows
"""Rows of inputs (N, ...), in memory or in a file."""


def join(first: Inputs, second: Inputs) -> Inputs:
    """Both sets of rows as one, (N + n, ...)."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.cat([first, second])
    return JoinedRows(first, second)


def as_tensor(x: Inputs) -> Tensor:
    """All rows as one tensor to read from, mapped from the file where they are in one."""
    return x if isinstance(x, Tensor) else x.mapped()


class Collected:
    """Batches of rows one after the other: in memory up to `most` bytes, in a temporary file beyond.

    The file lies where `tempfile` puts it (TMPDIR), without a name where the system can do that: it is gone as soon as
    nobody maps it, however the process ends.

    Parameters
    ----------
    most : None is all there are.
    name : of the argument that the rows came in, for messages.
    device : where rows in memory are kept.
    """

    def __init__(self, most: int | None, name: str, device: torch.device):
        self.most, self.name, self.device = most, name, device
        self.count = 0
        self._bytes = 0
        self._held: Tensor | None = None  # (room for rows, ...), `count` of them taken
        self._file: IO[bytes] | None = None
        self._dtype = torch.bool  # what all batches can be promoted to
        self._row_shape = torch.Size()

    def add(self, rows: Tensor) -> None:
        """Take up a batch (n, ...)."""
        dtype = torch.promote_types(self._dtype, rows.dtype)
        if self._file is not None and dtype != self._dtype:
            raise TypeError(
                f"{self.name}: rows of {rows.dtype} come after rows of {self._dtype}, use one of them for all"
            )
        self._dtype, self._row_shape = dtype, rows.shape[1:]
        self._bytes += rows.numel() * rows.element_size()
        if self._file is None:
            self._hold(rows)
        else:
            self._write(rows)
        self.count += len(rows)
        if self._file is None and self.most is not None and self._bytes > self.most:
            self._spill()

    @property
    def in_file(self) -> bool:
        """Whether there were too many rows for memory."""
        return self._file is not None

    def in_memory(self) -> Tensor:
        """All rows (N, ...), where there were not too many."""
        assert self._held is not None
        held, self._held = self._held, None
        return held if len(held) == self.count else held[: self.count].clone()

    def mapped(self) -> Tensor:
        """All rows (N, ...) on the CPU, mapped from the file."""
        assert self._file is not None
        with self._file as file:
            self._on_disk(file.flush)
            # Nobody writes to it, but a private map would be counted as memory, and refused where it is larger.
            pages = mmap(file.fileno(), 0)
        return torch.frombuffer(pages, dtype=self._dtype).view(self.count, *self._row_shape)

    def close(self) -> None:
        """Take the file away, unless it is mapped."""
        if self._file is not None:
            self._file.close()

    def _spill(self) -> None:
        self._file = self._on_disk(lambda: tempfile.TemporaryFile(prefix="fullcp-"))  # noqa: SIM115 (closed by `mapped` or `close`)
        self._write(self.in_memory())

    def _hold(self, rows: Tensor) -> None:
        """Copy rows behind those in memory, into room that doubles when it is full.

        A list of batches would leave each between what the loader makes and drops: memory that no one can use again.
        """
        taken = self.count + len(rows)
        if self._held is None or taken > len(self._held) or self._held.dtype != self._dtype:
            room = taken if self._held is None else max(taken, 2 * self.count)
            held = torch.empty(room, *self._row_shape, dtype=self._dtype, device=self.device)
            if self._held is not None:
                held[: self.count] = self._held[: self.count]
            self._held = held
        self._held[self.count : taken] = rows

    def _write(self, rows: Tensor) -> None:
        values = rows.to("cpu", self._dtype).contiguous().reshape(-1).view(torch.uint8).numpy().data
        assert self._file is not None
        file = self._file
        self._on_disk(lambda: file.write(values))

    def _on_disk(self, step: Callable[[], T]) -> T:
        """Do a step that writes; say what to do where the disk has no room for it."""
        try:
            return step()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise OSError(
                error.errno,
                f"{self.name} has more rows than memory may hold, and {self._bytes / 1e9:.3g} GB of them fill the disk "
                f"of the temporary folder {tempfile.gettempdir()}: set TMPDIR to one with more room, or raise memory",
            ) from error


def is_mapped(values: object) -> bool:
    """Whether an array is a view of a memory-mapped file."""
    if not isinstance(values, np.ndarray) or isinstance(values, np.ma.MaskedArray):
        return False
    base: Any = values
    while isinstance(base, (np.ndarray, memoryview)):
        base = base.base if isinstance(base, np.ndarray) else base.obj
    return isinstance(base, mmap)


def tensor_of(array: NDArray[Any]) -> Tensor:
    """A numeric array as a tensor; torch knows few unsigned numbers, no foreign byte orders and no long doubles."""
    if array.dtype.kind == "u":
        array = array.astype(np.float64 if array.max(initial=0) > 2**62 else np.int64)
    elif not array.dtype.isnative or array.dtype.itemsize > 8:
        array = array.astype(np.float64)
    if not (array.flags.writeable and array.flags.aligned) or any(stride < 0 for stride in array.strides):
        array = array.copy()
    return torch.from_numpy(array)
