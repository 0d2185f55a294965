"""What users hand in: arrays, tensors, frames or a DataLoader, checked and made into tensors.

Everything is refused here, with the argument's name, before any long work starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from numbers import Integral, Rational, Real
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, Dataset, RandomSampler

from fullcp.notices import warn
from fullcp.progress import track
from fullcp.sources import Collected, Inputs, StoredRows, is_mapped, tensor_of

_WRAP = "wrap it in a torch.utils.data.DataLoader"
_GATHERED = 8  # the part of the budget that the rows of a DataLoader may take (twice, while they are put together)


@dataclass(frozen=True)
class ModelTraits:
    """Where a model lives and what it computes in."""

    device: torch.device
    dtype: torch.dtype
    has_embedding: bool = False
    """Whether whole numbers may be tokens."""


@dataclass(frozen=True)
class Origin:
    """The kind of thing that came in, so that the same kind goes out."""

    device: torch.device | None
    """Device of the tensor that came in; None for NumPy, pandas and lists."""

    def restore(self, values: Tensor) -> Any:
        """Turn a result into a tensor on the caller's device, or into a NumPy array."""
        return values.detach().cpu().numpy() if self.device is None else values.detach().to(self.device)


@dataclass(frozen=True)
class Rows:
    """Checked data: inputs x (n, ...) for the model's device and, where given, float64 targets y (n, O)."""

    x: Inputs
    y: Tensor | None
    origin: Origin
    columns: list[str] | None = None
    """Names of the columns, where a frame came in."""

    def tensor(self) -> Tensor:
        """The inputs as one tensor, for methods that must hold them in memory."""
        return self.x if isinstance(self.x, Tensor) else self.x[:]


def model_traits(model: object, *, trainable: bool = True) -> ModelTraits:
    """Check that `model` is a usable module on one device, and read its traits.

    With `trainable`, it must have parameters with requires_grad: those it is linearised in.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, parameter in tensors.items():
        if is_lazy(parameter):
            raise ValueError(f"model parameter {name!r} is not initialised yet: run the model on one batch first")
    devices = sorted({str(t.device) for t in tensors.values()})
    if len(devices) > 1:
        raise ValueError(f"model must live on one device, its parameters are on {', '.join(devices)}")
    if devices == ["meta"]:
        raise ValueError("model is on the meta device: it has no values to predict with")
    learned = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if trainable and not learned:
        raise ValueError("model has no parameter with requires_grad=True: nothing to linearise in")
    for name, parameter in learned.items():
        if not parameter.is_floating_point():
            raise TypeError(f"model parameter {name!r} must be real floating point, got {parameter.dtype}")
        if parameter.is_inference():
            raise ValueError(f"model parameter {name!r} was made under torch.inference_mode: autograd cannot use it")
        if not torch.isfinite(parameter).all():
            raise ValueError(f"model parameter {name!r} contains NaN or infinite values")
    floating = [t for t in (*learned.values(), *tensors.values()) if t.is_floating_point()]
    dtype = floating[0].dtype if floating else torch.float32
    has_embedding = any(isinstance(module, (nn.Embedding, nn.EmbeddingBag)) for module in model.modules())
    return ModelTraits(torch.device(devices[0] if devices else "cpu"), dtype, has_embedding)


def read_rows(
    X: object,
    y: object,
    traits: ModelTraits,
    *,
    copy: bool = False,
    memory: int | None = None,
    x_name: str = "X",
    y_name: str = "y",
) -> Rows:
    """Check `X` and `y` (or one DataLoader of pairs in place of both) and bring them to the model's device.

    With `copy`, nothing is shared with the caller's arrays: what they do to them later does no harm. With `memory`,
    inputs that are memory-mapped stay in their file, and those of a DataLoader go to one where they take more than an
    eighth of so many bytes. Without it, all are tensors.
    """
    if isinstance(X, DataLoader):
        if y is not None:
            raise TypeError(f"{y_name} must be left out when {x_name} is a DataLoader: the loader yields both")
        rows, y = _gather(X, traits, memory, x_name, y_name)
        copy = False  # these are no one else's
    elif isinstance(X, Dataset):
        raise TypeError(f"{x_name} must be an array, tensor, frame or DataLoader, got {type(X).__name__}: {_WRAP}")
    elif y is None:
        raise TypeError(f"{y_name} is missing: pass the targets, or a DataLoader of (inputs, targets) as {x_name}")
    else:
        rows = _open(X, traits, memory, x_name)
    targets = _read_targets(y, traits.device, y_name)
    if len(targets) != len(rows.x):
        raise ValueError(f"{x_name} and {y_name} must have the same length, got {len(rows.x)} and {len(targets)} rows")
    if not isinstance(X, DataLoader):
        _check_stored(rows.x, memory, x_name)
    x = rows.x.clone() if copy and isinstance(rows.x, Tensor) else rows.x
    return Rows(x, targets.clone() if copy else targets, rows.origin, rows.columns)


def read_inputs(X: object, traits: ModelTraits, *, memory: int | None = None, name: str = "X") -> Rows:
    """Check inputs alone (for prediction) and bring them to the model's device; `memory` as in `read_rows`."""
    if isinstance(X, DataLoader):
        if isinstance(X.sampler, RandomSampler):
            raise ValueError(f"{name}: the DataLoader shuffles, so nobody could tell whose predictions these are")
        return _gather(X, traits, memory, name, None)[0]
    rows = _open(X, traits, memory, name)
    _check_stored(rows.x, memory, name)
    return rows


def _open(X: object, traits: ModelTraits, memory: int | None, name: str) -> Rows:
    """Inputs that are no DataLoader; rows in a file are left there, and their values are still to be checked."""
    stored = memory is not None and is_mapped(X)
    columns = [str(column) for column in X.columns] if hasattr(X, "columns") else None
    x, origin = _to_tensor(X[:0] if stored else X, name)  # type: ignore[index]
    shape = tuple(X.shape) if stored else tuple(x.shape)  # type: ignore[attr-defined]
    x = x.to(traits.dtype) if x.dtype == torch.bool else x
    _check_shape(shape, x.is_floating_point(), name)
    tokens = not x.is_floating_point() and (origin.device is not None or traits.has_embedding)
    dtype = x.dtype if tokens else traits.dtype
    if stored:
        return Rows(StoredRows(X, dtype, traits.device), None, origin)  # type: ignore[arg-type]
    _check_device(x, origin, traits, name)
    _check_finite(x, name)
    return Rows(x.to(traits.device, dtype), None, origin, columns)


def _check_shape(shape: tuple[int, ...], floating: bool, name: str) -> None:
    if len(shape) == 0 or (len(shape) == 1 and floating):
        hint = "one row is X.reshape(1, -1), one feature is X.reshape(-1, 1)"
        raise ValueError(f"{name} must have one row an example, got shape {shape}; {hint}")
    if 0 in shape:
        raise ValueError(f"{name} is empty: its shape is {shape}")


def _read_targets(y: object, device: torch.device, name: str) -> Tensor:
    """Targets as float64, (n, O)."""
    values, origin = _target_values(y, name)
    if values.numel() == 0:
        raise ValueError(f"{name} is empty: its shape is {tuple(values.shape)}")
    _check_finite(values, name)
    if origin.device is not None and origin.device.type == "meta":
        raise ValueError(f"{name} is on the meta device: it has no values")
    values = values.to(device, torch.float64)
    return values.unsqueeze(1) if values.ndim == 1 else values


def _target_values(y: object, name: str) -> tuple[Tensor, Origin]:
    """Targets as they are, (n,) or (n, O)."""
    if _is_boolean(y):
        raise TypeError(f"{name} must be numbers to regress on, got true and false")
    values, origin = _to_tensor(y, name)
    if values.ndim not in (1, 2):
        raise ValueError(f"{name} must have shape (n,) or (n, outputs), got {tuple(values.shape)}")
    return values, origin


def read_label(y: object, rows: int, outputs: int, device: torch.device) -> Tensor:
    """Candidate labels for `rows` test points, float64 (rows, outputs); one label serves all rows."""
    if isinstance(y, Real) and not isinstance(y, bool):
        y = np.full((rows, outputs), float(y))
    labels = _read_targets(y, device, "y")
    if labels.shape != (rows, outputs):
        wanted = f"({rows},)" if outputs == 1 else f"({rows}, {outputs})"
        raise ValueError(f"y must have shape {wanted}, one label a row of X, got {tuple(labels.shape)}")
    return labels


def read_candidates(candidates: object) -> Tensor:
    """Candidate labels in order without repetitions, float64 (K,)."""
    values, _ = _to_tensor(candidates, "candidates")
    if values.ndim != 1 or len(values) == 0:
        raise ValueError(f"candidates must be a whole number or labels (K,), got shape {tuple(values.shape)}")
    if _is_boolean(candidates):
        raise TypeError("candidates must be numbers, got true and false")
    _check_finite(values, "candidates")
    return torch.from_numpy(np.unique(values.cpu().double().numpy()))


def check_outputs(found: int, targets: Tensor, name: str = "y") -> None:
    """Refuse targets whose number of columns is not the model's number of outputs."""
    if targets.shape[1] != found:
        raise ValueError(f"{name} has {targets.shape[1]} column(s), the model has {found} output(s)")


def check_row_shape(x: Inputs, expected: Sequence[int], name: str = "X") -> None:
    """Refuse rows of another shape than those the predictor was given before."""
    if tuple(x.shape[1:]) != tuple(expected):
        raise ValueError(f"{name} has rows of shape {tuple(x.shape[1:])}, expected {tuple(expected)} as before")


def check_columns(found: list[str] | None, expected: list[str] | None, name: str = "X") -> None:
    """Refuse a frame whose columns have other names, or another order, than those seen before."""
    if found is not None and expected is not None and found != expected:
        how = "in another order" if sorted(found) == sorted(expected) else "of other names"
        raise ValueError(f"{name} has columns {how}: {', '.join(found[:8])}; expected {', '.join(expected[:8])}")


def check_choice(name: str, value: object, choices: Sequence[str], *, none: bool = False) -> None:
    """Refuse an option that is not one of the words it may be."""
    if not isinstance(value, str) or value not in choices:
        words = ", ".join([*(["None"] if none else []), *map(repr, choices)])
        raise ValueError(f"{name} must be one of {words}, got {value!r}")


def read_levels(confidence_level: object) -> list[Fraction]:
    """Confidence levels as exact decimal fractions, so that 0.95 * 20 is 19 and its ceiling too."""
    if isinstance(confidence_level, Tensor):
        confidence_level = confidence_level.detach().cpu().numpy()
    if isinstance(confidence_level, (str, bytes)):
        raise TypeError(f"confidence_level must be a number in (0, 1) or several, got {confidence_level!r}")
    levels = [confidence_level] if np.ndim(confidence_level) == 0 else list(confidence_level)  # type: ignore
    if not levels:
        raise ValueError("confidence_level is empty: give one level in (0, 1) or several")
    return [_read_level(level) for level in levels]


def read_single_level(confidence_level: object) -> Fraction:
    """The one level that a call which returns sets can take."""
    levels = read_levels(confidence_level)
    if len(levels) != 1:
        raise ValueError(f"confidence_level must be a single level here, got {len(levels)}")
    return levels[0]


def _read_level(level: object) -> Fraction:
    if isinstance(level, Tensor):
        level = level.detach().cpu().numpy()
    if isinstance(level, np.ndarray) and level.ndim == 0:
        level = level[()]
    if isinstance(level, (bool, np.bool_)) or not isinstance(level, (Real, Decimal, np.number)):
        raise TypeError(f"confidence_level must be a number in (0, 1), got {level!r}")
    if not 0.0 < float(level) < 1.0:
        hint = f": {float(level):g} % is {float(level) / 100:g}" if 1 < float(level) < 100 else ""
        raise ValueError(f"confidence_level must lie strictly between 0 and 1, got {level!r}{hint}")
    if isinstance(level, (Rational, Decimal)):
        return Fraction(level)
    # The number that was meant: 0.9, 5/6 or 19 * 0.05 and not the binary number nearest to it, whose product with
    # N + 1 may lie a hair above a whole number. float32 levels are read as they print.
    number = float(str(level)) if isinstance(level, np.floating) else float(level)
    simple = Fraction(number).limit_denominator(10**6)
    return simple if 0 < simple < 1 and abs(float(simple) - number) < 1e-15 else Fraction(repr(number))


def _gather(
    loader: DataLoader[Any], traits: ModelTraits, memory: int | None, name: str, y_name: str | None
) -> tuple[Rows, Tensor | None]:
    """One pass over a loader: the inputs and, where `y_name` says what to call them, the targets as they are.

    Everything is checked batch by batch, so that what is wrong shows early.
    """
    inputs = Collected(None if memory is None else memory // _GATHERED, name, traits.device)
    targets = Collected(None, y_name or "", traits.device)
    origin = Origin(None)
    floating = False
    first: list[Any] = []  # the shapes of rows in the first batch
    try:
        for k, batch in enumerate(track(loader, "reading", _batches_of(loader))):
            x, y, came_from = _read_batch(batch, loader, traits, inputs.count, name, y_name)
            shapes = [tuple(part.shape[1:]) for part in (x, y) if part is not None]
            if not first:
                first, origin = shapes, came_from
            if shapes != first:
                raise ValueError(
                    f"{name}: the DataLoader yields rows of shape {_words(shapes)} in batch {k} (from 0), of shape "
                    f"{_words(first)} before"
                )
            floating |= x.is_floating_point()
            inputs.add(x.to(traits.dtype) if x.is_floating_point() else x)
            if y is not None:
                targets.add(y)
            del batch, x, y  # before the loader makes the next
        if not first:
            raise ValueError(f"{name} is empty: the DataLoader yields no batch")
        _warn_of_dropped(loader, inputs.count, name)
        _check_shape((inputs.count, *first[0]), floating, name)
        if inputs.in_file:
            stored = inputs.mapped()
            x_all: Inputs = StoredRows(stored, stored.dtype, traits.device)
        else:
            x_all = inputs.in_memory()
    finally:
        inputs.close()
    return Rows(x_all, None, origin), None if y_name is None else targets.in_memory()


def _read_batch(
    batch: object, loader: DataLoader[Any], traits: ModelTraits, start: int, name: str, y_name: str | None
) -> tuple[Tensor, Tensor | None, Origin]:
    """One batch of a loader, rows from `start` on: inputs, targets where wanted, and where the inputs came from."""
    parts: list[Any] = list(batch) if isinstance(batch, (tuple, list)) else [batch]
    if y_name is not None and len(parts) != 2:
        raise TypeError(f"{name}: the DataLoader must yield (inputs, targets), got {len(parts)} part(s) a batch")
    if not parts or not all(isinstance(part, Tensor) for part in parts[:2]):
        found = type(parts[0]).__name__ if parts else "nothing"
        raise TypeError(f"{name}: the DataLoader must yield tensors, got {found}")
    if any(part.ndim == 0 for part in parts[:2]):
        raise TypeError(f"{name}: the DataLoader must yield batches, give it a batch_size")
    x, origin = _to_tensor(parts[0], name)
    x = x.to(traits.dtype) if x.dtype == torch.bool else x
    _check_finite(x, name, start)
    if y_name is None:
        return x, None, origin
    y, _ = _target_values(parts[1], y_name)
    if len(y) != len(x):
        raise ValueError(f"{name}: the DataLoader yields a batch of {len(x)} inputs and {len(y)} targets")
    _check_finite(y, y_name, start)
    return x, y, origin


def _batches_of(loader: DataLoader[Any]) -> int | None:
    """How many batches a loader says it has; iterable data sets need not know."""
    try:
        return len(loader)
    except TypeError:
        return None


def _warn_of_dropped(loader: DataLoader[Any], count: int, name: str) -> None:
    """A loader that drops its last batch is made for training; here each row counts."""
    if loader.drop_last and isinstance(loader.sampler, Sized):
        total = len(loader.sampler)
        if total > count:
            warn(
                f"{name}: the DataLoader has drop_last=True, so {total - count} of {total} rows are left out",
                UserWarning,
            )


def _words(shapes: list[tuple[int, ...]]) -> str:
    return " with targets of shape ".join(map(str, shapes))


def _to_tensor(values: object, name: str) -> tuple[Tensor, Origin]:
    if hasattr(values, "tocsr") or (isinstance(values, Tensor) and values.layout != torch.strided):
        how = "to_dense()" if isinstance(values, Tensor) else "toarray()"
        raise TypeError(f"{name} is sparse, {type(values).__name__}: networks take dense rows, pass {name}.{how}")
    if isinstance(values, (Dataset, Iterator)):
        hint = f": {_WRAP}" if isinstance(values, Dataset) else ""
        raise TypeError(f"{name} must be an array, tensor, frame or DataLoader, got {type(values).__name__}{hint}")
    if isinstance(values, Tensor):
        if values.is_complex():
            raise TypeError(f"{name} must be real numbers, got a tensor of {values.dtype}")
        values = values.detach()
        # Tensors made under torch.inference_mode cannot enter autograd; a copy made outside of it can.
        with torch.inference_mode(False):
            return (values.clone() if values.is_inference() else values), Origin(values.device)
    if hasattr(values, "select_dtypes"):  # a pandas frame: name the column that is no number
        values = _from_frame(values, name)
    elif hasattr(values, "to_numpy"):  # a series: its nullable kinds hold NA, which becomes NaN
        missing = bool(values.isna().any()) if hasattr(values, "isna") else False
        values = values.to_numpy(dtype=np.float64, na_value=np.nan) if missing else values.to_numpy()
    if values is None or isinstance(values, (str, bytes, dict)):
        raise TypeError(f"{name} must be an array, tensor, frame or DataLoader of numbers, got {type(values).__name__}")
    if isinstance(values, np.ma.MaskedArray):
        values = np.ma.filled(values.astype(np.float64), np.nan)
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise ValueError(f"{name} cannot be made into an array: {error}") from error
    if array.dtype == object:
        if _holds_words(array):
            raise TypeError(f"{name} must hold numbers only")
        array = np.array([np.nan if v is None else float(v) for v in _plain(array)]).reshape(array.shape)
    if array.dtype.kind not in "fiub":
        raise TypeError(f"{name} must be real numbers, got an array of dtype {array.dtype}")
    return tensor_of(array), Origin(None)


def _from_frame(frame: Any, name: str) -> Any:
    """A pandas frame as float64; missing values of any kind become NaN, for the check that names the row."""
    bad = [str(column) for column in frame.columns if not _holds_numbers(frame[column])]
    if bad:
        raise TypeError(f"{name} has columns that are not numbers: {', '.join(bad)}")
    return frame.to_numpy(dtype=np.float64, na_value=np.nan)


def _holds_numbers(column: Any) -> bool:
    kind = getattr(column.dtype, "kind", "O")
    return kind in "fiub" or (kind == "O" and not _holds_words(column.to_numpy()))


def _holds_words(array: NDArray[Any]) -> bool:
    """Whether an object array has entries that are neither numbers nor missing."""
    return any(not (value is None or isinstance(value, (Real, np.number)) or value != value) for value in _plain(array))


def _plain(array: NDArray[Any]) -> list[Any]:
    """The entries of an object array, with pandas' NA (which is not even unequal to itself) as None."""
    return [None if type(value).__name__ == "NAType" else value for value in array.ravel()]


def _is_boolean(values: Any) -> bool:
    """Whether targets are true and false, in whatever container."""
    kinds = values.dtypes if hasattr(values, "columns") else [getattr(values, "dtype", None)]
    if any(getattr(kind, "kind", None) == "b" or kind == torch.bool for kind in kinds):
        return True
    if not isinstance(values, (list, tuple)) and getattr(getattr(values, "dtype", None), "kind", None) != "O":
        return False
    array = np.asarray(values)
    return array.size > 0 and all(isinstance(value, (bool, np.bool_)) for value in array.ravel())


def _check_device(x: Tensor, origin: Origin, traits: ModelTraits, name: str) -> None:
    if origin.device is not None and origin.device != traits.device:
        raise ValueError(f"{name} is on {origin.device}, the model on {traits.device}: move one of them")


def check_all_finite(start: int | None, parts: dict[str, Tensor | None]) -> None:
    """Refuse what a model made of the rows from `start` on (None: somewhere), naming the first NaN or infinity."""
    for what, values in parts.items():
        if values is not None and not torch.isfinite(values).all():
            row = int((~torch.isfinite(values)).flatten(1).any(1).nonzero()[0, 0])
            where = "a row of X" if start is None else f"row {start + row} of X"
            raise ValueError(f"model has NaN or infinite {what} at {where}")


def _check_stored(x: Inputs, memory: int | None, name: str) -> None:
    """Check the values of rows that are in a file, within an eighth of the budget."""
    if isinstance(x, Tensor) or memory is None or not x.as_stored(slice(0, 1)).is_floating_point():
        return
    chunks = list(x.chunks(memory // 8))
    for rows in track(chunks, "checking", len(chunks)):
        _check_finite(x.as_stored(rows), name, rows.start)


def _check_finite(x: Tensor, name: str, start: int | None = None) -> None:
    """Refuse NaN and infinite values; x may be rows from `start` on of a whole that nobody has looked through."""
    if x.is_meta or not x.is_floating_point():
        return
    if torch.isfinite(x.sum()):  # one cheap pass: a NaN or an infinity anywhere would show
        return
    bad = (~torch.isfinite(x)).reshape(len(x), -1).any(1)
    if bad.any():
        first = int(bad.nonzero()[0, 0])
        if start is not None:
            raise ValueError(f"{name} contains NaN or infinite values, the first in row {start + first}")
        raise ValueError(f"{name} contains NaN or infinite values in {int(bad.sum())} row(s), the first is row {first}")


def check_positive_int(name: str, value: object, *, least: int = 1) -> int:
    """Refuse anything that is not a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be a whole number, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return int(value)
