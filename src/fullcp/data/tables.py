"""A user's own table: CSV, Parquet, or an array that NumPy saved."""

from __future__ import annotations

import csv
import gzip
import re
import zipfile
import zlib
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from fullcp.data.table import Table, checked_table

if TYPE_CHECKING:
    import pandas as pd

_TEXT, _PARQUET, _NUMPY = (".csv", ".txt", ".csv.gz", ".txt.gz"), (".parquet", ".pq"), (".npy", ".npz")
_DAMAGED = (gzip.BadGzipFile, EOFError, zlib.error, zipfile.BadZipFile)  # what unpacking raises
_DECIMAL_COMMA = re.compile(r"\s*[+-]?\d*,\d+\s*")
_SHOWN = 20  # names in a message


def load_table(
    path: str | PathLike[str],
    target: str | int | None = None,
    *,
    columns: Sequence[str | int] | None = None,
    exclude: Sequence[str | int] | None = None,
) -> Table:
    r"""Read a table of numbers: a row an example, a column an input, and one of them the target.

    Parameters
    ----------
    path : file
        ``.csv`` or ``.txt`` (with names in the first line; ``.gz`` too) and ``.parquet`` (these need pandas), ``.npy``
        (a matrix), or ``.npz`` (arrays X and y, or one matrix).
    target : str, int or None
        The name of the target's column, or its number from 0 (-1 is the last one). None is the last one.
    columns : list of str or int
        The inputs, by name or number. None takes all columns but the target.
    exclude : list of str or int
        Columns to leave out in place of naming those to keep. They need not hold numbers.

    Returns
    -------
    Table
        With `X` (N, I), `y` (N,), and the names `columns` and `target`.

    Examples
    --------
    >>> import tempfile, pathlib
    >>> path = pathlib.Path(tempfile.mkdtemp(), "houses.csv")
    >>> _ = path.write_text("price,rooms,street\n" + "\n".join(f"{100 + 9 * i},{1 + i % 7},Elm" for i in range(20)))
    >>> table = load_table(path, target="price", exclude=["street"])
    >>> table.X.shape, table.columns
    ((20, 1), ('rooms',))
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"path is no file: {path}")
    if columns is not None and exclude is not None:
        raise ValueError("columns names the inputs to keep, exclude those to leave out: give one of them")
    name = path.name.lower()
    if name.endswith(_NUMPY):
        values, names = _from_numpy(path)
        chosen = _Choice.of(path.name, names, target, columns, exclude)
        values = values[:, chosen.places]
    elif name.endswith(_TEXT + _PARQUET):
        frame = _text(path) if name.endswith(_TEXT) else _parquet(path)
        chosen = _Choice.of(path.name, list(frame.columns), target, columns, exclude)
        values = _numbers_of(frame.iloc[:, chosen.places], path.name)
    else:
        raise ValueError(f"path must end in .csv, .txt, .parquet, .npy or .npz (or .csv.gz), got {path.name}")
    return checked_table(path.name, values, chosen.names, chosen.target)


class _Choice:
    """The columns that are wanted of a file, in its order, and which is the target."""

    def __init__(self, names: list[str], places: list[int], target: int):
        self.places, self.names, self.target = places, [names[j] for j in places], names[target]

    @classmethod
    def of(
        cls,
        file: str,
        names: list[str],
        target: str | int | None,
        columns: Sequence[str | int] | None,
        exclude: Sequence[str | int] | None,
    ) -> _Choice:
        """Find each of the columns asked for, or say that there is none of the name."""
        for which, given in (("columns", columns), ("exclude", exclude)):
            if isinstance(given, str):
                raise TypeError(f"{which} must be a list of names or numbers, got {given!r}")
        if columns is None:
            without = {_place("exclude", word, names, file) for word in exclude or ()}
            kept = [j for j in range(len(names)) if j not in without]
            place = _place("target", kept[-1] if target is None and kept else target, names, file)
            if place in without:
                raise ValueError(f"exclude has the target {names[place]!r} among them")
        else:
            place = _place("target", target, names, file)
            kept = sorted({place, *(_place("columns", word, names, file) for word in columns)})
        for j in kept:
            if not names[j]:
                raise ValueError(
                    f"{file} has no name for column {j}, from 0 (pandas writes numbers of rows there unless told "
                    f"index=False): give it one, or leave it out with exclude=[{j}]"
                )
        return cls(names, kept, place)


def _place(which: str, word: str | int | None, names: list[str], file: str) -> int:
    """The number of a column that is asked for by name or number; None is the last one."""
    if word is None:
        return len(names) - 1
    if isinstance(word, (bool, np.bool_)) or not isinstance(word, (str, int, np.integer)):
        raise TypeError(f"{which} must be a column's name or number, got {word!r}")
    if not isinstance(word, str):
        if not -len(names) <= word < len(names):
            raise ValueError(f"{which} {word} is no column of {file}, which has {len(names)}, from 0")
        return int(word) % len(names)
    if word not in names:
        shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
        raise ValueError(f"{which} {word!r} is no column of {file}: it has {shown}")
    return names.index(word)


def _pandas(name: str) -> Any:
    try:
        import pandas
    except ImportError as error:
        raise ImportError(f"reading {name} needs pandas: pip install pandas, or save the table as .npy") from error
    return pandas


def _text(path: Path) -> pd.DataFrame:
    """Names in the first line, numbers below; whatever pandas would quietly make of other files is refused."""
    pd = _pandas(path.name)
    try:
        separator, names = _header(path)
        frame = pd.read_csv(
            path,
            sep=separator,
            skipinitialspace=True,
            encoding="utf-8-sig",
            compression="gzip" if path.suffix.lower() == ".gz" else None,
            low_memory=False,
        )
    except _DAMAGED as error:
        raise ValueError(f"{path.name} is damaged, and could not be unpacked ({error})") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path.name} is no text in UTF-8 ({error}): save it as such") from error
    except (ValueError, pd.errors.ParserError) as error:
        raise ValueError(f"{path.name} could not be read: {error}") from error
    if not isinstance(frame.index, pd.RangeIndex) or frame.shape[1] != len(names):
        raise ValueError(
            f"{path.name} has {len(names)} names in its first line, and more numbers in the lines below: each column "
            "needs a name (decimals and names must not have the separator in them)"
        )
    frame.columns = names
    return frame


def _header(path: Path) -> tuple[str, list[str]]:
    """What separates columns, and their names: the first line that is not empty."""
    with _opened(path) as file:
        first = next((line for line in file if line.strip()), "")
    if not first:
        raise ValueError("it is empty")
    found = max(",;\t|", key=first.count)
    if found in first:
        with _opened(path) as file:  # a quoted name may go on in the next line
            lines = csv.reader(file, delimiter=found, skipinitialspace=True)
            names = [name.strip() for name in next(line for line in lines if line)]
    else:
        found, names = r"\s+", [name.strip('"') for name in first.split()]
    if all(_is_number(name) for name in names):
        raise ValueError(f"its first line is numbers ({', '.join(names[:_SHOWN])}), and must be names of the columns")
    _check_unequal(names)
    return found, names


def _check_unequal(names: Sequence[str]) -> None:
    twice = next((name for j, name in enumerate(names) if name and name in names[:j]), None)
    if twice is not None:
        raise ValueError(f"it has two columns {twice!r}")


def _opened(path: Path) -> IO[str]:
    if path.suffix.lower() == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _parquet(path: Path) -> pd.DataFrame:
    pd = _pandas(path.name)
    try:
        frame = pd.read_parquet(path)
        names = [str(column) for column in frame.columns]
        _check_unequal(names)
    except ImportError as error:
        raise ImportError(
            f"reading {path.name} needs pyarrow: pip install 'fullcp[tables]', or save it as CSV"
        ) from error
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(f"{path.name} could not be read: {error}") from error
    index = [str(name) for name in frame.index.names if name is not None]
    if index:
        raise ValueError(
            f"{path.name} has {', '.join(map(repr, index))} as the index of its rows, which is no column: make it one "
            "(frame.reset_index()), or drop it (frame.reset_index(drop=True)), and save it again"
        )
    frame = frame.reset_index(drop=True)
    frame.columns = names
    return frame


def _numbers_of(frame: pd.DataFrame, name: str) -> Any:
    """The matrix (N, I + 1) of a frame that has nothing but numbers."""
    if len(frame):  # columns without rows are of no type
        for place in range(frame.shape[1]):
            _check_numbers(frame.iloc[:, place], name)
        return frame.to_numpy(dtype=np.float64, na_value=np.nan)
    return np.zeros(frame.shape)


def _check_numbers(column: pd.Series[Any], name: str) -> None:
    """Refuse text and dates, with the first value that is none."""
    import pandas as pd

    if pd.api.types.is_numeric_dtype(column) and not pd.api.types.is_complex_dtype(column):
        return
    texts = column[pd.to_numeric(column, errors="coerce").isna() & column.notna()]
    if not len(texts):
        raise ValueError(f"{name} has {column.dtype} in column {column.name!r}: columns must be numbers")
    where = f"column {column.name!r}, row {int(texts.index[0]) + 1}: {str(texts.iloc[0])!r}"
    if all(_DECIMAL_COMMA.fullmatch(str(text)) for text in texts):
        raise ValueError(
            f"{name} has decimal commas in {where}. Write points in their place (pandas.read_csv, decimal)"
        )
    raise ValueError(
        f"{name} has text in {where}. Columns must be numbers: leave it out (exclude), or turn categories into columns "
        "of 0 and 1 (pandas.get_dummies); '?' and the like are missing values"
    )


def _from_numpy(path: Path) -> tuple[Any, list[str]]:
    held = _arrays(path)
    if isinstance(held, np.ndarray):
        return _matrix(held, path.name, "the array"), _numbered(held)
    if {"X", "y"} <= set(held):
        X, y = _matrix(held["X"], path.name, "X"), np.asarray(held["y"])
        if y.shape not in ((len(X),), (len(X), 1)):
            raise ValueError(f"{path.name}: y must have shape ({len(X)},), as X has {len(X)} rows, got {y.shape}")
        values = np.column_stack([X, _numbers(y.reshape(-1), path.name, "y")])
        return values, [*_numbered(X), "y"]
    if len(held) == 1:
        (name,) = held
        return _matrix(held[name], path.name, name), _numbered(held[name])
    raise ValueError(f"{path.name} must hold X and y, or one matrix; it holds {', '.join(held) or 'nothing'}")


def _arrays(path: Path) -> Any:
    """The array of a file, or its arrays by name; those of Python objects could run code, and are not opened."""
    try:
        held = np.load(path, allow_pickle=False)
        if isinstance(held, np.ndarray):
            return held
        with held:
            return {name: held[name] for name in held.files}
    except (ValueError, OSError, *_DAMAGED) as error:
        raise ValueError(
            f"{path.name} could not be read: it is damaged, or holds no arrays of numbers that numpy.save or "
            "numpy.savez wrote"
        ) from error


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
