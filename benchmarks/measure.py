"""What all benchmarks share: clocks, memory, and where a number comes from."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"


def provenance():
    """Command with what it was told of data sets, commit and machine."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    data = [f"FULLCP_DATA={os.environ['FULLCP_DATA']}"] if os.environ.get("FULLCP_DATA") else []
    return {
        "command": " ".join([*data, "python", str(Path(sys.argv[0]).resolve().relative_to(ROOT)), *sys.argv[1:]]),
        "commit": commit.stdout.strip(),
        "machine": f"{platform.processor() or platform.machine()}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} thread(s){gpu}",
    }


def seconds(function):
    """Wall-clock seconds of one call."""
    synchronise()
    start = time.perf_counter()
    function()
    synchronise()
    return time.perf_counter() - start


def synchronise():
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def rate_of_products(device, n=2048):
    """Float64 operations a second in the best of several large products, two an element."""
    A, B = (torch.randn(n, n, dtype=torch.float64, device=device) for _ in range(2))
    out = torch.empty_like(A)
    return 2 * n**3 / min(seconds(lambda: torch.mm(A, B, out=out)) for _ in range(5))


class Anonymous(threading.Thread):
    """The most memory that is not of a file while inside, over that before, sampled every few milliseconds."""

    def __init__(self):
        super().__init__(daemon=True)
        self.most, self.running = 0, True

    def __enter__(self):
        self.before = self.most = anonymous()
        self.start()
        return self

    def __exit__(self, *error):
        self.running = False
        self.join()

    @property
    def above(self):
        """Bytes over those before."""
        return self.most - self.before

    def run(self):
        """Sample until told to stop."""
        while self.running:
            self.most = max(self.most, anonymous())
            time.sleep(0.002)


def anonymous():
    """Bytes of this process that no file lies behind."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))
