"""Where a number comes from: commit and device."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import torch

from fullcp.version import __version__


def commit() -> str:
    """The commit of this checkout (FULLCP_COMMIT where there is none), else the version."""
    given = os.environ.get("FULLCP_COMMIT")
    if given:
        return given
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            capture_output=True,
            text=True,
            cwd=Path(__file__).parent,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return __version__
    return done.stdout.strip()


def device_name(device: torch.device) -> str:
    """The device in words."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} thread(s)"
