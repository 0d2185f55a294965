"""Run by test_memory.py in a process of its own: conformalize many rows, predict, report the peak."""

from __future__ import annotations

import json
import resource
import sys
import time

import torch
from torch import nn

import fullcp


def main(rows: int, points: int, residuals: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 50), nn.GELU(), nn.Linear(50, 1))  # D = 501
    X = torch.randn(rows, 8)
    with torch.no_grad():
        y = model(X)[:, 0] + torch.randn(rows)
    start = time.perf_counter()
    cp = fullcp.FullConformalRegressor(model, residuals=residuals).conformalize(X, y)
    fitted = time.perf_counter()
    intervals = cp.predict_interval(torch.randn(points, 8), [0.9, 0.95, 0.99]).intervals
    done = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    report = {"peak": peak, "fit": fitted - start, "predict": done - fitted, "finite": bool(intervals.isfinite().all())}
    print(json.dumps(report))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
