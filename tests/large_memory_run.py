"""Run by test_kernels.py in a process of its own: exact curvature of a large network, and the peak of its memory."""

from __future__ import annotations

import json
import sys
import threading
import time
import warnings
from pathlib import Path

import torch
from torch import nn

import fullcp

NETWORKS = {
    # name -> network, shape of a row, rows
    "mlp": (
        lambda: nn.Sequential(nn.Linear(50, 1400), nn.Tanh(), nn.Linear(1400, 1400), nn.Tanh(), nn.Linear(1400, 1)),
        (50,),
        1000,
    ),
    "cnn": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, 2, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
            nn.Conv2d(64, 512, 3, 2, 1, bias=False), nn.BatchNorm2d(512), nn.ReLU(),
            nn.Conv2d(512, 512, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512 * 4, 1),
        ),
        (3, 16, 16),
        800,
    ),
}  # fmt: skip


class Anonymous(threading.Thread):
    """The most memory that is not of a file, sampled every few milliseconds."""

    def __init__(self):
        super().__init__(daemon=True)
        self.before = self.most = anonymous()

    def run(self):
        while True:
            self.most = max(self.most, anonymous())
            time.sleep(0.003)


def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def main(kind: str) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", fullcp.FarFromMinimumWarning)  # nobody trained it
    make, shape, rows = NETWORKS[kind]
    model = make().eval()
    X = torch.randn(rows, *shape)
    with torch.no_grad():
        y = model(X)[:, 0] + 0.1 * torch.randn(rows)
    watcher = Anonymous()
    watcher.start()
    start = time.perf_counter()
    cp = fullcp.FullConformalRegressor(model, l2=1.0, memory="600MB").conformalize(X, y)
    fitted = time.perf_counter()
    intervals = cp.predict_interval(torch.randn(50, *shape), [0.9, 0.95]).intervals
    done = time.perf_counter()
    report = {
        "gradients": 4 * rows * sum(p.numel() for p in model.parameters()),
        "curvature": cp.curvature_.name,
        "peak": watcher.most - watcher.before,
        "fit": fitted - start,
        "predict": done - fitted,
        "finite": bool(intervals.isfinite().all()),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1])
