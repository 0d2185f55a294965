"""Run by test_memory.py in a process of its own: the memory that rows larger than the budget take."""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import fullcp

CHUNK = 1024


class AnonymousMemory:
    """The largest RssAnon of this process while inside, over that at the start: file-backed pages do not count."""

    def __enter__(self):
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        self.start = self.peak = self._now()
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()
        return self

    def __exit__(self, *error):
        self.done.set()
        self.thread.join()
        self.peak = max(self.peak, self._now())

    @property
    def above(self):
        return self.peak - self.start

    def _watch(self):
        while not self.done.wait(0.002):
            self.peak = max(self.peak, self._now())

    @staticmethod
    def _now():
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return 1024 * int(line.split()[1])
        raise AssertionError("no RssAnon in /proc/self/status")


def chunk_of(start, stop, features):
    generator = torch.Generator().manual_seed(start)
    return torch.randn(stop - start, features, generator=generator)


class Stream(IterableDataset):
    """Batches of the same rows, of which nobody knows how many come."""

    def __init__(self, rows, features, model):
        self.rows, self.features, self.model = rows, features, model

    def __iter__(self):
        for start in range(0, self.rows, CHUNK):
            x = chunk_of(start, min(start + CHUNK, self.rows), self.features)
            yield x, targets(x, self.model)


def targets(x, model):
    with torch.no_grad():
        return model(x)[:, 0] + torch.sin(1e4 * x[:, 0])


def main(kind, method, rows, features, memory, points=200):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Linear(features, 1)
    network = nn.Sequential(nn.Linear(features, 2), nn.Tanh(), nn.Linear(2, 1)) if method == "network" else model
    options = {"l2": 1.0} if method != "marglik" else {}

    def predictor(memory):
        if method == "normalized split":
            return fullcp.NormalizedSplitConformalRegressor(network, memory=memory, **options)
        if method == "refined split":
            return fullcp.RefinedSplitConformalRegressor(network, memory=memory, **options)
        return fullcp.FullConformalRegressor(network, memory=memory, **options)

    def give(cp, X, y=None):
        return cp.fit(X, y).conformalize(X, y) if method == "normalized split" else cp.conformalize(X, y)

    with tempfile.TemporaryDirectory() as folder:
        X, y = None, None
        if kind == "memmap":
            X = np.memmap(Path(folder) / "X", dtype=np.float32, mode="w+", shape=(rows, features))
            y = np.empty(rows)
            for start in range(0, rows, CHUNK):
                x = chunk_of(start, min(start + CHUNK, rows), features)
                X[start : start + CHUNK] = x.numpy()
                y[start : start + CHUNK] = targets(x, model).numpy()
            X.flush()
            X = np.memmap(Path(folder) / "X", dtype=np.float32, mode="r", shape=(rows, features))
        else:
            X = DataLoader(Stream(rows, features, model), batch_size=None)
        x_new = chunk_of(10**9, 10**9 + points, features).numpy()
        x_warm = chunk_of(10**8, 10**8 + 2000, features)  # what libraries load and keep comes before the measurement
        give(predictor("5MB"), x_warm, targets(x_warm, model)).predict_interval(x_new)
        report = {}
        with AnonymousMemory() as fitting:
            start = time.perf_counter()
            cp = give(predictor(memory), X, y)
            report["fit_seconds"] = time.perf_counter() - start
        with AnonymousMemory() as predicting:
            start = time.perf_counter()
            intervals = cp.predict_interval(x_new, [0.9, 0.95]).intervals
            report["predict_seconds"] = time.perf_counter() - start
        report |= {"fit": fitting.above, "predict": predicting.peak - fitting.start}
        report["finite"] = bool(np.isfinite(intervals).all())
        report["parameters"] = cp.network_.size
        report["sum"] = float(intervals.sum())
        print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5], int(sys.argv[6]))
