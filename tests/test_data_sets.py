"""Data sets: where they are found, how they are cleaned, and what is said of files that will not do."""

from __future__ import annotations

import gzip
import io
import os
import warnings
import zipfile
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from fullcp.data import (
    DATASETS,
    DataUnavailableError,
    Standardizer,
    cross_validation,
    halves,
    load_dataset,
    load_table,
    random_splits,
)
from fullcp.data.uci import digest

ROWS, INPUTS = 40, 3
NUMBERS = np.random.default_rng(0).normal(size=(ROWS, INPUTS + 1)).round(3)
TEXT = "\n".join(" ".join(str(v) for v in row) for row in NUMBERS)
HAVE_DATA = bool(os.environ.get("FULLCP_DATA"))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and no folder of the user's."""
    monkeypatch.delenv("FULLCP_DATA", raising=False)
    monkeypatch.setenv("FULLCP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def offer(monkeypatch, *urls, numbers=None):
    """Yacht, as if it were these numbers at these addresses."""
    known = replace(DATASETS["yacht"], rows=ROWS, inputs=INPUTS, urls=urls, digest=numbers)
    monkeypatch.setitem(DATASETS, "yacht", known)


def zipped(files):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["plain", "gzip", "zip", "zip in zip"])
def test_a_download_fills_the_cache_once(tmp_path, monkeypatch, cache, kind):
    content = {
        "plain": TEXT.encode(),
        "gzip": gzip.compress(TEXT.encode()),
        "zip": zipped({"folder/yacht.txt": TEXT}),
        "zip in zip": zipped({"other.txt": "1", "inner.zip": zipped({"yacht.txt": TEXT})}),
    }[kind]
    home = tmp_path / "home"
    home.write_bytes(content)
    offer(monkeypatch, (tmp_path / "nowhere").as_uri(), home.as_uri())
    table = load_dataset("yacht")
    np.testing.assert_array_equal(table.X, NUMBERS[:, :-1])
    np.testing.assert_array_equal(table.y, NUMBERS[:, -1])
    home.unlink()
    assert [path.name for path in cache.iterdir()] == ["yacht.txt.gz"]
    np.testing.assert_array_equal(load_dataset("yacht").y, table.y)
    offer(monkeypatch, numbers=digest(table))
    load_dataset("yacht")
    offer(monkeypatch, numbers="0" * 64)
    with pytest.raises(ValueError, match=r"yacht\.txt\.gz has other numbers than yacht should have"):
        load_dataset("yacht")


def test_the_users_folder_comes_first(tmp_path, monkeypatch, cache):
    cache.mkdir()
    (cache / "yacht.txt").write_text("1 2 3\n")
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "yacht.txt.gz").write_bytes(gzip.compress(TEXT.encode()))
    monkeypatch.setenv("FULLCP_DATA", str(mine))
    offer(monkeypatch)
    assert len(load_dataset("yacht")) == ROWS


@pytest.mark.parametrize(
    "content", [gzip.compress(TEXT.encode())[:-30], b"no gzip at all", b"\x1f\x8b\x08" + bytes(40)]
)
def test_a_damaged_file_is_named(tmp_path, monkeypatch, cache, content):
    (tmp_path / "yacht.txt.gz").write_bytes(content)
    monkeypatch.setenv("FULLCP_DATA", str(tmp_path))
    offer(monkeypatch)
    with pytest.raises(ValueError, match=rf"^{tmp_path}/yacht\.txt\.gz is damaged \(.*\): delete it, and get it anew$"):
        load_dataset("yacht")
    # Downloads that break off are tried elsewhere.
    (tmp_path / "yacht.txt.gz").rename(tmp_path / "broken")
    (tmp_path / "whole").write_text(TEXT)
    if content[:2] == b"\x1f\x8b":
        offer(monkeypatch, (tmp_path / "broken").as_uri(), (tmp_path / "whole").as_uri())
        assert len(load_dataset("yacht")) == ROWS


def test_other_numbers_in_the_users_folder_are_warned_of(tmp_path, monkeypatch, cache):
    (tmp_path / "yacht.txt").write_text(TEXT)
    monkeypatch.setenv("FULLCP_DATA", str(tmp_path))
    offer(monkeypatch, numbers="0" * 64)
    with pytest.warns(
        UserWarning, match=rf"{tmp_path}/yacht\.txt has other numbers than yacht has in the paper's tables"
    ):
        table = load_dataset("yacht")
    offer(monkeypatch, numbers=digest(table))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_dataset("yacht")


def test_what_is_not_to_be_had_says_where_to_put_it(tmp_path, monkeypatch, cache):
    missing = (tmp_path / "nowhere").as_uri()
    offer(monkeypatch, missing)
    with pytest.raises(DataUnavailableError, match=r"yacht\.txt is not in .*cache.*nowhere.*FULLCP_DATA"):
        load_dataset("yacht")
    monkeypatch.setitem(DATASETS, "facebook_2", replace(DATASETS["facebook_2"], urls=()))
    with pytest.raises(DataUnavailableError, match=r"Features_Variant_2\.csv is not in .* no public download"):
        load_dataset("facebook_2")
    assert not cache.exists()


def test_a_file_of_another_shape_is_refused(tmp_path, monkeypatch, cache):
    cache.mkdir()
    (cache / "yacht.txt").write_text("\n".join(TEXT.splitlines()[:-1]))
    offer(monkeypatch)
    with pytest.raises(ValueError, match="has 39 rows and 3 inputs, yacht has 40 and 3"):
        load_dataset("yacht")
    (cache / "yacht.txt").write_text("<html>moved</html>")
    with pytest.raises(ValueError, match=r"yacht\.txt is not the data set yacht"):
        load_dataset("yacht")
    with pytest.raises(ValueError, match="name must be"):
        load_dataset("yachts")


@pytest.mark.skipif(not HAVE_DATA, reason="FULLCP_DATA names no folder with the paper's data sets")
@pytest.mark.parametrize("name", [name for name in DATASETS if name != "facebook_2"])
def test_the_papers_data_sets(name):
    known, table = DATASETS[name], load_dataset(name)
    assert table.X.shape == (known.rows, known.inputs)
    assert np.isfinite(table.X).all()
    assert digest(table) == known.digest


# A user's own table


def frame(**changes):
    columns = {"size": np.arange(20.0) % 7, "rooms": np.arange(20) % 3, "price": np.arange(20.0) ** 2}
    return pd.DataFrame({**columns, **changes})


def write(data, path):
    if path.suffix.lower() in (".parquet", ".pq"):
        pytest.importorskip("pyarrow")
        data.to_parquet(path)
    else:
        data.to_csv(path, index=False)
    return path


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz", "t.txt", "T.CSV", "t.TXT.GZ", "t.parquet", "t.PQ"])
def test_tables_of_any_kind(tmp_path, name):
    table = load_table(write(frame(), tmp_path / name), target="size")
    np.testing.assert_array_equal(table.X, frame()[["rooms", "price"]].to_numpy())
    np.testing.assert_array_equal(table.y, frame()["size"])
    assert (table.columns, table.target) == (("rooms", "price"), "size")


def test_numpy_files(tmp_path):
    matrix = frame().to_numpy()
    np.save(tmp_path / "m.npy", matrix)
    np.savez(tmp_path / "p.npz", X=matrix[:, :2], y=matrix[:, 2])
    np.savez(tmp_path / "o.npz", matrix)
    for name in ("m.npy", "p.npz", "o.npz"):
        table = load_table(tmp_path / name)
        np.testing.assert_array_equal(np.column_stack([table.X, table.y]), matrix)
    np.testing.assert_array_equal(load_table(tmp_path / "m.npy", target=0).y, matrix[:, 0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rooms": [1.0, None, 3.0, None, *range(16)]}, r"a missing value in column 'rooms', row 2, and 1 more row"),
        ({"rooms": [1.0, np.inf, *range(18)]}, r"an infinite value in column 'rooms', row 2"),
        ({"rooms": ["two", *range(19)]}, r"text in column 'rooms', row 1: 'two'.*get_dummies"),
        ({"rooms": [1] * 20}, r"the same value in all rows of column 'rooms': leave it out"),
        ({"price": [1] * 20}, r"the same value in all rows of target 'price'"),
    ],
)
def test_what_is_wrong_with_a_table_is_named(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        load_table(write(frame(**changes), tmp_path / "t.csv"))


def test_other_mistakes(tmp_path):
    path = write(frame(), tmp_path / "t.csv")
    with pytest.raises(ValueError, match=r"target 'cost' is no column of t\.csv: it has size, rooms, price"):
        load_table(path, target="cost")
    with pytest.raises(ValueError, match=r"target 3 is no column of t\.csv, which has 3, from 0"):
        load_table(path, target=3)
    with pytest.raises(TypeError, match=r"target must be a column's name or number, got 1\.5"):
        load_table(path, target=1.5)
    with pytest.raises(ValueError, match=r"t.csv has 9 row\(s\), at least 10 are needed"):
        load_table(write(frame()[:9], path))
    with pytest.raises(ValueError, match="has one column, the target 'price'"):
        load_table(write(frame()[["price"]], path))
    with pytest.raises(FileNotFoundError, match="path is no file"):
        load_table(tmp_path / "missing.csv")
    (tmp_path / "t.xlsx").write_bytes(b"1")
    with pytest.raises(ValueError, match=r"path must end in .*got t\.xlsx"):
        load_table(tmp_path / "t.xlsx")
    np.save(tmp_path / "t.npy", np.zeros(5))
    with pytest.raises(ValueError, match=r"must be a matrix .*\(5,\)"):
        load_table(tmp_path / "t.npy")


# What pandas would make something else of, without a word


def lines(head, row=lambda i: f"{i % 7},{i % 3},{i * i}"):
    return "\n".join([head, *(row(i) for i in range(20))]) + "\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (lines("1,2,3"), r"its first line is numbers \(1, 2, 3\), and must be names"),
        (lines("size,rooms"), "has 2 names in its first line, and more numbers in the lines below"),
        (lines("size,rooms,price", lambda i: f"{i % 7},{i % 3},{i},{5 if i else 1}"), "has 3 names in its first line"),
        (lines("a b", lambda i: f"r{i} {i % 3} {i}"), "has 2 names in its first line"),  # as R writes row names
        (lines("size,rooms,size"), "it has two columns 'size'"),
        (lines("size, rooms,rooms"), "it has two columns 'rooms'"),
        (lines(",rooms,price"), r"no name for column 0, .* leave it out with exclude=\[0\]"),
        (lines("a;b", lambda i: f"{i},5;{i}"), r"decimal commas in column 'a', row 1: '0,5'. Write points"),
        ("size,rooms,price\n", r"t\.csv has 0 row\(s\), at least 10 are needed"),
        ("", r"t\.csv could not be read: it is empty"),
        ("\n\n", r"t\.csv could not be read: it is empty"),
    ],
)
def test_files_that_pandas_reads_otherwise(tmp_path, text, message):
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        load_table(path)
    assert "t.csv" in str(caught.value)


@pytest.mark.parametrize(
    "head", ["size, rooms, price", "size , rooms , price ", '"size","rooms","price"', "\n\nsize,rooms,price"]
)
def test_names_of_columns(tmp_path, head):
    (tmp_path / "t.csv").write_text(lines(head))
    table = load_table(tmp_path / "t.csv", target="rooms")
    assert table.columns == ("size", "price")
    np.testing.assert_array_equal(table.X[:, 1], np.arange(20.0) ** 2)
    (tmp_path / "t.csv").write_text("\ufeff" + lines(head.strip()), encoding="utf-8")
    assert load_table(tmp_path / "t.csv").columns == ("size", "rooms")


def test_columns_are_chosen_or_left_out(tmp_path):
    data = frame(street=[f"road {i}" for i in range(20)])
    path = write(data, tmp_path / "t.csv")
    with pytest.raises(ValueError, match=r"text in column 'street', row 1: 'road 0'.*leave it out \(exclude\)"):
        load_table(path, target="price")
    for table in (
        load_table(path, target="price", exclude=["street"]),
        load_table(path, exclude=[-1]),  # the last of those that are left is the target
        load_table(path, target=2, columns=["rooms", "size"]),
    ):
        assert (table.columns, table.target) == (("size", "rooms"), "price")
        np.testing.assert_array_equal(np.column_stack([table.X, table.y]), frame().to_numpy())
    assert load_table(path, target="price", columns=["rooms"]).columns == ("rooms",)
    matrix = frame().to_numpy()
    np.save(tmp_path / "m.npy", matrix)
    np.testing.assert_array_equal(load_table(tmp_path / "m.npy", exclude=[0]).X, matrix[:, 1:2])
    with pytest.raises(ValueError, match=r"exclude 'lane' is no column of t\.csv: it has size, rooms, price, street"):
        load_table(path, exclude=["lane"])
    with pytest.raises(ValueError, match=r"columns 4 is no column of t\.csv, which has 4, from 0"):
        load_table(path, target="price", columns=[4])
    with pytest.raises(ValueError, match="exclude has the target 'price' among them"):
        load_table(path, target="price", exclude=["price", "street"])
    with pytest.raises(ValueError, match="give one of them"):
        load_table(path, columns=["size"], exclude=["street"])
    with pytest.raises(TypeError, match="exclude must be a list of names or numbers, got 'street'"):
        load_table(path, exclude="street")
    with pytest.raises(ValueError, match="has one column, the target 'price'"):
        load_table(path, target="price", columns=[])


def test_an_index_is_no_column(tmp_path):
    pytest.importorskip("pyarrow")
    frame().set_index("price").to_parquet(tmp_path / "t.parquet")
    with pytest.raises(ValueError, match=r"t\.parquet has 'price' as the index of its rows, .*reset_index\(\)"):
        load_table(tmp_path / "t.parquet")
    frame()[::-1].to_parquet(tmp_path / "t.parquet")  # labels without a name are nothing but labels
    np.testing.assert_array_equal(load_table(tmp_path / "t.parquet").y, frame()["price"][::-1])
    (tmp_path / "t.parquet").write_bytes(b"PAR1 and nothing else")
    with pytest.raises(ValueError, match=r"t\.parquet could not be read"):
        load_table(tmp_path / "t.parquet")


@pytest.mark.parametrize("name", ["t.csv.gz", "t.npy", "t.npz"])
@pytest.mark.parametrize("cut", [True, False])
def test_damaged_files_are_named(tmp_path, name, cut):
    path = tmp_path / name
    if name.endswith(".gz"):
        write(frame(), path)
    else:
        (np.save if name == "t.npy" else np.savez)(path, frame().to_numpy())
    path.write_bytes(path.read_bytes()[:-40] if cut else b"something else")
    with pytest.raises(ValueError, match=rf"^t\.{name[2:]} (is damaged|could not be read)") as caught:
        load_table(path)
    assert "allow_pickle" not in str(caught.value)


def test_arrays_of_objects_are_not_opened(tmp_path):
    np.save(tmp_path / "o.npy", np.array([[1, "two"]], dtype=object), allow_pickle=True)
    with pytest.raises(
        ValueError, match=r"o\.npy could not be read: it is damaged, or holds no arrays of numbers"
    ) as caught:
        load_table(tmp_path / "o.npy")
    assert "pickle" not in str(caught.value)
    (tmp_path / "t.csv").write_bytes(lines("größe,b,c").encode("latin-1"))
    with pytest.raises(ValueError, match=r"no text in UTF-8"):
        load_table(tmp_path / "t.csv")
    (tmp_path / "t.npy.gz").write_bytes(b"1")
    with pytest.raises(ValueError, match="path must end in"):
        load_table(tmp_path / "t.npy.gz")


# Splits and scaling


def test_cross_validation_tests_each_row_once():
    folds = list(cross_validation(53, 10, 3))
    assert sorted(np.concatenate([test for _, test in folds])) == list(range(53))
    for train, test in folds:
        assert sorted([*train, *test]) == list(range(53))
        assert len(test) in (5, 6)
    again = list(cross_validation(53, 10, 3))
    assert all(np.array_equal(a[0], b[0]) for a, b in zip(folds, again))
    other = list(cross_validation(53, 10, 4))
    assert not np.array_equal(folds[0][1], other[0][1])


def test_splits_do_not_depend_on_how_many_follow():
    few, many = list(random_splits(100, 2)), list(random_splits(100, 5))
    assert all(np.array_equal(a[0], b[0]) for a, b in zip(few, many))
    train, test = many[-1]
    assert len(test) == 10
    assert sorted([*train, *test]) == list(range(100))
    fit, cal = halves(train, share=0.25)
    assert (len(fit), len(cal)) == (68, 22)
    assert sorted([*fit, *cal]) == sorted(train)


def test_standardizer_by_hand():
    values = np.array([[1.0, 4.0], [3.0, 4.0]])
    scale = Standardizer.of(values)
    assert scale.transform([[5.0, 4.5]]).tolist() == [[3.0, 0.5]]
    np.testing.assert_allclose(scale.inverse(scale.transform(values)), values)


@pytest.mark.parametrize("separator", [",", ";", "\t", "|", " "])
def test_separators(tmp_path, separator):
    path = tmp_path / "t.csv"
    frame().to_csv(path, index=False, sep=separator)
    assert load_table(path).columns == ("size", "rooms")
