"""Rows in files and from loaders give what the same rows in memory give, and what is wrong is said."""

from __future__ import annotations

import copy
import errno
import gc
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import fullcp
from fullcp import inputs, sources
from fullcp.inputs import model_traits, read_inputs, read_rows
from fullcp.sources import Collected, StoredRows
from predictor_cases import LEVELS, PREDICTORS, build, data, network, network_for

MEMORY = 10**8


def on_disk(array, folder, mode="r", dtype=None):
    array = np.asarray(array)
    path = Path(folder) / f"{uuid4()}.bin"
    stored = np.memmap(path, dtype=dtype or array.dtype, mode="w+", shape=array.shape)
    stored[:] = array
    stored.flush()
    return np.memmap(path, dtype=dtype or array.dtype, mode=mode, shape=array.shape)


def spools():
    """The files without a name in the temporary folder that this process maps."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[0] for line in lines if line.endswith("(deleted)") and tempfile.gettempdir() in line}


class Stream(IterableDataset):
    """Batches made one after the other, of which nobody knows how many come."""

    def __init__(self, *batches):
        self.batches = batches

    def __iter__(self):
        yield from self.batches


def loader(*batches):
    return DataLoader(Stream(*batches), batch_size=None)


def in_batches(X, y=None, size=16):
    pairs = [(X[i : i + size], None if y is None else y[i : i + size]) for i in range(0, len(X), size)]
    return loader(*(x if y is None else (x, y_) for x, y_ in pairs))


class Giving:
    """A predictor whose rows are changed into something else on the way."""

    def __init__(self, cp, change):
        self.cp, self.change = cp, change

    def fit(self, X, y):
        self.cp.fit(*self.change(X, y))
        return self

    def conformalize(self, X, y):
        self.cp.conformalize(*self.change(X, y))
        return self


@pytest.fixture
def spooled(monkeypatch, tmp_path):
    """Loaders leave nothing in memory."""
    monkeypatch.setattr(inputs, "_GATHERED", 10**15)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("name", PREDICTORS)
class TestSameBits:
    def check(self, name, outputs, change, change_new):
        if outputs == 2 and name not in ("full, signed, deleted", "split", "normalized split", "laplace"):
            pytest.skip("one output shows it")
        kind, arguments, give = PREDICTORS[name]
        cp = kind(network_for(name, outputs), **arguments)
        give(Giving(cp, change), *data(outputs))
        X_new, expected = data(seed=5)[0], build(name, outputs)
        found, wanted = cp.predict_interval(change_new(X_new), LEVELS), expected.predict_interval(X_new, LEVELS)
        for a, b in zip(found, wanted):
            assert torch.equal(torch.as_tensor(a), b)
        assert torch.equal(torch.as_tensor(cp.p_value(change_new(X_new), 0.3)), expected.p_value(X_new, 0.3))
        assert torch.equal(torch.as_tensor(copy.deepcopy(cp).predict(change_new(X_new))), expected.predict(X_new))
        return cp, expected

    def test_memmap(self, name, outputs, tmp_path):
        def change(X, y):
            return on_disk(X, tmp_path), y.numpy()

        cp, expected = self.check(name, outputs, change, lambda X: on_disk(X, tmp_path))
        cp.save(tmp_path / "a")
        expected.save(tmp_path / "b")
        X_new = data(seed=5)[0]
        loaded = type(cp).load(tmp_path / "a", cp.model)
        wanted = expected.predict_interval(X_new, LEVELS)
        assert torch.equal(loaded.predict_interval(X_new, LEVELS).intervals, wanted.intervals)
        assert (tmp_path / "a").stat().st_size == (tmp_path / "b").stat().st_size

    def test_loader(self, name, outputs, spooled):
        cp, _ = self.check(name, outputs, lambda X, y: (in_batches(X, y), None), in_batches)
        cp.save(spooled / "a")
        X_new = data(seed=5)[0]
        loaded = type(cp).load(spooled / "a", cp.model)
        assert torch.equal(
            loaded.predict_interval(X_new, LEVELS).intervals, cp.predict_interval(X_new, LEVELS).intervals
        )


@pytest.mark.parametrize("name", ["full", "full, signed, deleted", "full, last layer", "normalized split", "laplace"])
def test_many_chunks_give_the_same_bits(name, tmp_path, monkeypatch):
    """With the smallest budget, gradients are computed again and loaders go to a file of themselves.

    Other chunks round otherwise: in the network's own precision, and the climb to a tuned l2 magnifies that. So the
    comparison across budgets is one of a float64 network with its l2 given.
    """
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    kind, arguments, give = PREDICTORS[name]
    X, y = data(rows=6000, dtype=torch.float64)

    def intervals(change, **settings):
        cp = kind(network(dtype=torch.float64), **{**arguments, "l2": 1.0, **settings})
        return give(Giving(cp, change), X, y).cp.predict_interval(X[:8], LEVELS).intervals

    made = intervals(lambda X, y: (X, y), memory="1MB")
    assert torch.equal(intervals(lambda X, y: (on_disk(X, tmp_path), y.numpy()), memory="1MB"), made)
    spilled = []
    spill = Collected._spill
    monkeypatch.setattr(Collected, "_spill", lambda self: (spilled.append(self.count), spill(self)))
    assert torch.equal(intervals(lambda X, y: (in_batches(X, y, 500), None), memory="1MB"), made)
    assert spilled
    torch.testing.assert_close(made, intervals(lambda X, y: (X, y)), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "dtype", ["<f4", ">f4", "f8", ">f8", "f2", "g", "i1", "i8", ">i4", "u1", "u2", "u4", "u8", "?"]
)
def test_every_dtype_is_converted_as_in_memory(dtype, tmp_path):
    array = (np.random.default_rng(0).integers(0, 100, (50, 3)) % (2 if dtype == "?" else 100)).astype(dtype)
    traits = model_traits(nn.Linear(3, 1))
    stored = read_inputs(on_disk(array, tmp_path), traits, memory=MEMORY).x
    expected = read_inputs(array, traits).x
    assert isinstance(stored, StoredRows)
    assert stored.dtype == expected.dtype == torch.float32
    assert torch.equal(stored[:], expected)
    assert torch.equal(stored[[3, 1, 49]], expected[[3, 1, 49]])
    assert torch.equal(stored[5:40:7], expected[5:40:7])


def test_views_and_layouts_of_maps(tmp_path):
    array = np.random.default_rng(0).normal(size=(60, 8))
    mapped = on_disk(array, tmp_path)
    np.save(tmp_path / "f.npy", np.asfortranarray(array))
    traits = model_traits(nn.Linear(3, 1))
    views = {
        "slice": (mapped[10:50], array[10:50]),
        "columns": (mapped[:, 1:7:2], array[:, 1:7:2]),
        "backwards": (mapped[::-1], array[::-1]),
        "plain array": (np.asarray(mapped)[3:], array[3:]),
        "np.load": (np.load(tmp_path / "f.npy", mmap_mode="r"), array),
        "writable": (on_disk(array, tmp_path, "r+"), array),
        "copy on write": (on_disk(array, tmp_path, "c"), array),
        "reshaped": (mapped.reshape(60, 2, 4), array.reshape(60, 2, 4)),
    }
    for name, (view, plain) in views.items():
        found = read_inputs(view, traits, memory=MEMORY).x
        assert isinstance(found, StoredRows), name
        assert found[:].is_contiguous()
        assert torch.equal(found[:], read_inputs(np.array(plain), traits).x), name
        assert torch.equal(found.mapped(), found[:]), name
    for copied in (mapped[[1, 2]], mapped + 1, np.array(mapped), np.ma.MaskedArray(mapped)):
        assert isinstance(read_inputs(copied, traits, memory=MEMORY).x, torch.Tensor)


def test_files_are_never_written_to(tmp_path):
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, x):
            return self.layer(x.relu_())

    X, y = data()
    stored = on_disk(X, tmp_path, "r+")
    fullcp.FullConformalRegressor(Writes()).conformalize(stored, y).predict_interval(stored)
    assert np.array_equal(stored, X.numpy())


def test_tokens_stay_whole_numbers(tmp_path, spooled):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 3), nn.Flatten(), nn.Linear(6, 1))
    X, y = torch.randint(0, 9, (40, 2)), torch.randn(40)
    expected = fullcp.FullConformalRegressor(model).conformalize(X, y).predict_interval(X).intervals
    for form in (on_disk(X, tmp_path), on_disk(X, tmp_path, dtype="u1")):
        found = fullcp.FullConformalRegressor(model).conformalize(form, y.numpy()).predict_interval(form).intervals
        np.testing.assert_array_equal(found, expected)
    found = fullcp.FullConformalRegressor(model).conformalize(in_batches(X, y)).predict_interval(in_batches(X))
    assert torch.equal(found.intervals, expected)


def test_half_precision_is_spooled_too(spooled):
    traits = model_traits(nn.Linear(4, 1).bfloat16())
    X, y = data()
    rows = read_rows(in_batches(X, y), None, traits, memory=MEMORY)
    assert isinstance(rows.x, StoredRows)
    assert torch.equal(rows.x[:], X.bfloat16())


def test_loaders_stay_in_memory_where_they_fit():
    traits = model_traits(nn.Linear(4, 1))
    X, y = data()
    assert isinstance(read_rows(in_batches(X, y), None, traits, memory=9 * X.nbytes).x, torch.Tensor)
    assert isinstance(read_rows(in_batches(X, y), None, traits, memory=7 * X.nbytes).x, StoredRows)
    assert isinstance(read_rows(in_batches(X, y), None, traits).x, torch.Tensor)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="looks at the maps of the process")
def test_temporary_files_go_with_the_predictor(spooled):
    X, y = data()
    before = spools()
    cp = fullcp.FullConformalRegressor(network()).conformalize(in_batches(X, y))
    twin = copy.deepcopy(cp)
    assert len(spools() - before) == 1  # in TMPDIR, shared by the copy
    assert not list(spooled.iterdir())  # without a name: gone when the process is, however it ends
    expected = cp.predict_interval(X).intervals
    del cp
    gc.collect()
    assert torch.equal(twin.predict_interval(X).intervals, expected)
    del twin
    gc.collect()
    assert spools() == before


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks at the open files of the process")
def test_temporary_files_go_after_an_error(spooled):
    X, y = data()
    before = len(os.listdir("/proc/self/fd"))
    X[40, 2] = float("nan")
    with pytest.raises(ValueError, match="X contains NaN or infinite values, the first in row 40"):
        fullcp.FullConformalRegressor(network()).conformalize(in_batches(X, y))
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
    assert not list(spooled.iterdir())


def test_a_full_disk_is_said(spooled, monkeypatch):
    class Full:
        def __init__(self, file):
            self.file = file

        def write(self, values):
            raise OSError(errno.ENOSPC, "No space left on device")

        def __getattr__(self, name):
            return getattr(self.file, name)

    make = tempfile.TemporaryFile
    monkeypatch.setattr(sources.tempfile, "TemporaryFile", lambda **kw: Full(make(**kw)))
    with pytest.raises(OSError, match=r"X has more rows than memory may hold, .* TMPDIR .*, or raise memory") as error:
        fullcp.SplitConformalRegressor(network()).conformalize(in_batches(*data()))
    assert error.value.errno == errno.ENOSPC
    assert str(spooled) in str(error.value)


def test_pickles_say_why_not(tmp_path):
    X, y = data()
    cp = fullcp.FullConformalRegressor(network()).conformalize(on_disk(X, tmp_path), y)
    with pytest.raises(TypeError, match=r"rows in a file .* cannot be pickled: use save\(path\)"):
        pickle.dumps(cp)
    split = fullcp.SplitConformalRegressor(network()).conformalize(on_disk(X, tmp_path), y)
    assert torch.equal(pickle.loads(pickle.dumps(split)).predict(X), split.predict(X))  # it keeps no rows


X, Y = data()
NAN = X.clone()
NAN[20, 1] = float("inf")


@pytest.mark.parametrize(
    ("source", "error", "words"),
    [
        (loader(), ValueError, "X is empty: the DataLoader yields no batch"),
        (loader((X[:0], Y[:0])), ValueError, r"X is empty: its shape is \(0, 4\)"),
        (
            loader((X[:9], Y[:9]), (X[:9, :2], Y[:9])),
            ValueError,
            r"X: the DataLoader yields rows of shape \(2,\) .* in batch 1 \(from 0\), of shape \(4,\) with",
        ),
        (loader((X[:9], Y[:9]), (X[:9], Y[:9, None])), ValueError, r"targets of shape \(1,\) in batch 1"),
        (loader((X[:9], Y[:9]), X[9:]), TypeError, r"the DataLoader must yield \(inputs, targets\), got 1 part"),
        (loader((X[:9], Y[:8])), ValueError, "the DataLoader yields a batch of 9 inputs and 8 targets"),
        (
            loader((X[:9], Y[:9]), (X[9:], Y[9:] / 0)),
            ValueError,
            "y contains NaN or infinite values, the first in row 9",
        ),
        (loader((X[:9], Y[:9]), (NAN[9:], Y[9:])), ValueError, "X contains NaN .*, the first in row 20"),
        (loader((X[:9], Y[:9] > 0)), TypeError, "y must be numbers to regress on, got true and false"),
        (loader(*zip(X, Y)), TypeError, "X: the DataLoader must yield batches, give it a batch_size"),
    ],
)
@pytest.mark.parametrize("in_file", [False, True])
def test_loaders_that_cannot_be(source, error, words, in_file, monkeypatch):
    if in_file:
        monkeypatch.setattr(inputs, "_GATHERED", 10**15)
    with pytest.raises(error, match=words):
        fullcp.FullConformalRegressor(network()).conformalize(source)


def test_other_dtypes_after_the_file_has_begun(spooled):
    traits = model_traits(nn.Linear(4, 1))
    mixed = loader((X[:9].long(), Y[:9]), (X[9:], Y[9:]))
    with pytest.raises(TypeError, match=r"X: rows of torch.float32 come after rows of torch.int64"):
        read_rows(mixed, None, traits, memory=MEMORY)
    promoted = loader((X[:9], Y[:9]), (X[9:].long(), Y[9:]))
    rows = read_rows(promoted, None, traits, memory=MEMORY)
    assert torch.equal(rows.x[:], torch.cat([X[:9], X[9:].long().float()]))


def test_maps_that_cannot_be(tmp_path, monkeypatch):
    def give(X, y=Y):
        fullcp.FullConformalRegressor(network()).conformalize(X, y)

    bad = on_disk(NAN, tmp_path)
    with pytest.raises(ValueError, match="X contains NaN or infinite values, the first in row 20"):
        give(bad)
    with pytest.raises(ValueError, match="X and y must have the same length, got 70 and 69 rows"):
        give(bad, Y[:-1])  # before the values are looked through
    with pytest.raises(ValueError, match=r"X must have one row an example, got shape \(4,\)"):
        give(bad[0])
    with pytest.raises(ValueError, match="X is empty"):
        give(bad[:0])
    with pytest.raises(TypeError, match="X must be real numbers, got an array of dtype complex64"):
        give(on_disk(NAN, tmp_path, dtype="c8"))
    with pytest.raises(ValueError, match=r"X: the model cannot process rows of shape \(3,\)"):
        give(on_disk(X[:, :3], tmp_path))
    cp = fullcp.SplitConformalRegressor(network()).conformalize(X, Y)
    with pytest.raises(ValueError, match=r"X has rows of shape \(3,\), expected \(4,\)"):
        cp.predict(on_disk(X[:, :3], tmp_path))
    with pytest.raises(ValueError, match="the first in row 20"):
        cp.predict(bad)


def test_the_first_bad_row_of_many_chunks(tmp_path):
    array = np.zeros((5000, 40), np.float32)
    array[[3210, 4999], 7] = np.nan
    traits = model_traits(nn.Linear(40, 1))
    with pytest.raises(ValueError, match="the first in row 3210"):
        read_inputs(on_disk(array, tmp_path), traits, memory=8 * 10**4)


def test_a_batch_larger_than_the_share_is_spooled(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    collected = Collected(10, "X", torch.device("cpu"))
    collected.add(X)
    collected.add(X[:3])
    assert collected.in_file
    assert torch.equal(collected.mapped(), torch.cat([X, X[:3]]))


def test_no_bars_in_a_pipe():
    code = (
        "import torch, fullcp\nfrom test_sources import in_batches, X, Y\nfrom predictor_cases import network\n"
        "fullcp.SplitConformalRegressor(network()).conformalize(in_batches(X, Y)).predict(in_batches(X))"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_loaders_with_a_length_are_the_same(spooled):
    expected = fullcp.FullConformalRegressor(network()).conformalize(X, Y).predict_interval(X).intervals
    cp = fullcp.FullConformalRegressor(network()).conformalize(DataLoader(TensorDataset(X, Y), batch_size=16))
    assert torch.equal(cp.predict_interval(DataLoader(TensorDataset(X, Y), batch_size=9)).intervals, expected)
