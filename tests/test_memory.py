"""The memory promise: 200,000 rows of 500 parameters within 3 GB of resident memory."""

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
