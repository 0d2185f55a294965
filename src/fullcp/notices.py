"""Warnings that point at the line of the caller's code, however deep in this library they come up."""

from __future__ import annotations

import sys
import warnings
from types import FrameType


def warn(message: str, category: type[Warning]) -> None:
    """Warn as of the first line outside of this package."""
    depth = 2
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] == __name__.split(".")[0]:
        depth, frame = depth + 1, frame.f_back
    warnings.warn(message, category, stacklevel=depth)
