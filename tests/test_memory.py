"""The memory promise: 200,000 rows of 500 parameters within 3 GB of resident memory; rows larger than the budget."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("residuals", ["signed", pytest.param("absolute", marks=pytest.mark.slow)])
def test_many_rows_stay_within_memory(residuals):
    script = Path(__file__).with_name("memory_run.py")
    command = [sys.executable, str(script), "200000", "2000", residuals]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    report = json.loads(run.stdout)
    assert report["finite"]
    assert report["peak"] < 3e9, report
    assert run.stderr == ""  # no progress bars in a pipe


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads what the kernel says about the process")
@pytest.mark.parametrize("kind", ["memmap", "loader"])
@pytest.mark.parametrize(
    ("method", "rows", "features", "memory", "points"),
    [
        ("full", 62_500, 800, 50, 20),  # 200 MB of rows, as much again of gradients
        pytest.param("full", 400_000, 1000, 300, 200, marks=pytest.mark.slow),  # 1.6 GB
        pytest.param("marglik", 62_500, 800, 50, 20, marks=pytest.mark.slow),
        pytest.param("refined split", 62_500, 800, 50, 20, marks=pytest.mark.slow),
        pytest.param("normalized split", 62_500, 800, 50, 20, marks=pytest.mark.slow),
        pytest.param("network", 62_500, 800, 50, 20, marks=pytest.mark.slow),
        pytest.param("full", 440_000, 50, 200, 20, marks=pytest.mark.slow),  # gradients just fit half of the budget
    ],
)
def test_rows_larger_than_the_budget(kind, method, rows, features, memory, points):
    """Anonymous memory stays below the budget, two float64 matrices of the curvature and a few vectors of N."""
    script = Path(__file__).with_name("streaming_run.py")
    command = [sys.executable, str(script), kind, method, str(rows), str(features), f"{memory}MB", str(points)]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    report = json.loads(run.stdout)
    assert report["finite"]
    assert max(report["fit"], report["predict"]) < memory * 1e6 + 2 * 8 * report["parameters"] ** 2 + 6 * 8 * rows, (
        report
    )
