"""A user's own table: CSV, Parquet, or an array that NumPy saved."""

from __future__ import annotations

import gzip
import zipfile
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fullcp.data.table import Table, checked_table

if TYPE_CHECKING:
    import pandas as pd

_READERS = {
    ".csv": "read_csv",
    ".gz": "read_csv",
    ".txt": "read_csv",
    ".parquet": "read_parquet",
    ".pq": "read_parquet",
}


def load_table(path: str | PathLike[str], target: str | int | None = None) -> Table:
    r"""Read a table of numbers: a row an example, a column an input, and one of them the target.

    Parameters
    ----------
    path : file
        ``.csv`` or ``.txt`` (with names in the first line; ``.gz`` too) and ``.parquet`` (these need pandas), ``.npy``
        (a matrix), or ``.npz`` (arrays X and y, or one matrix).
    target : str, int or None
        The name of the target's column, or its number from 0 (-1 is the last one). None is the last one.

    Returns
    -------
    Table
        With `X` (N, I), `y` (N,), and the names `columns` and `target`.

    Examples
    --------
    >>> import tempfile, pathlib
    >>> path = pathlib.Path(tempfile.mkdtemp(), "houses.csv")
    >>> _ = path.write_text("price,rooms\n" + "\n".join(f"{100 + 9 * i},{1 + i % 7}" for i in range(20)))
    >>> table = load_table(path, target="price")
    >>> table.X.shape, table.columns
    ((20, 1), ('rooms',))
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"path is no file: {path}")
    if path.suffix in (".npy", ".npz"):
        values, columns = _from_numpy(path)
    elif path.suffix in _READERS:
        values, columns = _from_pandas(path)
    else:
        raise ValueError(f"path must end in .csv, .txt, .parquet, .npy or .npz (or .csv.gz), got {path.name}")
    return checked_table(path.name, values, columns, _find(target, columns, path.name))


def _find(target: str | int | None, columns: list[str], name: str) -> str:
    """The name of the target's column."""
    if target is None:
        return columns[-1]
    if isinstance(target, bool) or not isinstance(target, (str, int)):
        raise TypeError(f"target must be a column's name or number, got {target!r}")
    if isinstance(target, int):
        if not -len(columns) <= target < len(columns):
            raise ValueError(f"target {target} is no column of {name}, which has {len(columns)}, from 0")
        return columns[target]
    if target not in columns:
        shown = ", ".join(columns[:20]) + (", ..." if len(columns) > 20 else "")
        raise ValueError(f"target {target!r} is no column of {name}: it has {shown}")
    return target


def _from_pandas(path: Path) -> tuple[Any, list[str]]:
    try:
        import pandas as pd
    except ImportError as error:
        raise ImportError(f"reading {path.name} needs pandas: pip install pandas, or save the table as .npy") from error
    kind = _READERS[path.suffix]
    try:
        frame = pd.read_parquet(path) if kind == "read_parquet" else pd.read_csv(path, sep=_separator(path))
    except ImportError as error:
        raise ImportError(f"reading {path.name} needs pyarrow: pip install pyarrow, or save it as CSV") from error
    except (ValueError, UnicodeDecodeError, pd.errors.ParserError) as error:
        raise ValueError(f"{path.name} could not be read: {error}") from error
    frame.columns = [str(column) for column in frame.columns]
    if frame.columns.duplicated().any():
        raise ValueError(f"{path.name} has two columns {frame.columns[frame.columns.duplicated()][0]!r}")
    for column in frame.columns:
        _check_numbers(frame[column], path.name)
    return frame.to_numpy(dtype=np.float64, na_value=np.nan), list(frame.columns)


def _separator(path: Path) -> str:
    """What stands most often between the names in the first line; white space where none of the usual does."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        first = file.readline().strip()
    found = max(",;\t|", key=first.count)
    return found if found in first else r"\s+"


def _check_numbers(column: pd.Series[Any], name: str) -> None:
    """Refuse text and dates, with the first value that is none."""
    import pandas as pd

    if pd.api.types.is_numeric_dtype(column) and not pd.api.types.is_complex_dtype(column):
        return
    texts = column[pd.to_numeric(column, errors="coerce").isna() & column.notna()]
    if len(texts):
        raise ValueError(
            f"{name} has text in column {column.name!r}, row {int(column.index.get_loc(texts.index[0])) + 1}: "
            f"{str(texts.iloc[0])!r}. Columns must be numbers: leave it out, or turn categories into columns of 0 and "
            "1 (pandas.get_dummies); '?' and the like are missing values"
        )
    raise ValueError(f"{name} has {column.dtype} in column {column.name!r}: columns must be numbers")


def _from_numpy(path: Path) -> tuple[Any, list[str]]:
    try:
        held = np.load(path, allow_pickle=False)
    except (ValueError, zipfile.BadZipFile, EOFError) as error:
        raise ValueError(f"{path.name} could not be read: {error}") from error
    if isinstance(held, np.ndarray):
        return _matrix(held, path.name, "the array"), _numbered(held)
    with held:
        names = list(held.files)
        if {"X", "y"} <= set(names):
            X, y = _matrix(held["X"], path.name, "X"), np.asarray(held["y"])
            if y.shape not in ((len(X),), (len(X), 1)):
                raise ValueError(f"{path.name}: y must have shape ({len(X)},), as X has {len(X)} rows, got {y.shape}")
            values = np.column_stack([X, _numbers(y.reshape(-1), path.name, "y")])
            return values, [*_numbered(X), "y"]
        if len(names) == 1:
            matrix = _matrix(held[names[0]], path.name, names[0])
            return matrix, _numbered(matrix)
        raise ValueError(f"{path.name} must hold X and y, or one matrix; it holds {', '.join(names) or 'nothing'}")


def _numbered(matrix: Any) -> list[str]:
    return [str(j) for j in range(matrix.shape[1])]


def _matrix(array: Any, name: str, which: str) -> Any:
    if array.ndim != 2:
        raise ValueError(f"{name}: {which} must be a matrix (rows, columns), got shape {array.shape}")
    return _numbers(array, name, which)


def _numbers(array: Any, name: str, which: str) -> Any:
    if array.dtype.kind not in "fiub":
        raise ValueError(f"{name}: {which} must hold numbers, got {array.dtype}")
    return array.astype(np.float64)
