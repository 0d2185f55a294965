"""The working-memory budget: how many rows may be handled at once."""

from __future__ import annotations

import os
import re
from numbers import Real

import torch

DEFAULT_MEMORY = "2GB"
_UNITS = {"B": 1, "KB": 1000, "MB": 1000**2, "GB": 1000**3, "TB": 1000**4, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_SMALLEST = 1000**2


def parse_memory(memory: object) -> int:
    """Bytes in a budget such as ``"2GB"``, ``"500 MB"`` or a plain number of bytes.

    Examples
    --------
    >>> parse_memory("2GB")
    2000000000
    """
    if isinstance(memory, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B)\s*", memory, flags=re.IGNORECASE)
        if match is None or match[2].upper() not in _UNITS:
            raise ValueError(f"memory must look like '2GB' or '500MB', got {memory!r}")
        size = int(float(match[1]) * _UNITS[match[2].upper()])
    elif isinstance(memory, Real) and not isinstance(memory, bool) and memory == memory:
        size = int(min(float(memory), 2.0**62))
    else:
        raise TypeError(f"memory must be a string such as '2GB' or a number of bytes, got {type(memory).__name__}")
    if size < _SMALLEST:
        raise ValueError(f"memory must be at least 1MB, got {memory!r}")
    return size


def in_words(size: float) -> str:
    """A number of bytes for messages.

    Examples
    --------
    >>> in_words(28.8e9), in_words(4e7), in_words(3.84e6)
    ('28.8 GB', '40 MB', '3.8 MB')
    """
    if size >= 1000**3:
        return f"{size / 1000**3:.1f} GB"
    return f"{size / 1000**2:.0f} MB" if size >= 10 * 1000**2 else f"{size / 1000**2:.1f} MB"


def check_held(needed: int, device: torch.device, *, by: str, what: str, advice: str) -> None:
    """Refuse what the machine cannot hold, before it starts to swap.

    Parameters
    ----------
    needed : bytes.
    by : the structure that needs them.
    what : for what.
    advice : what takes less.
    """
    if device.type == "cuda":
        held = torch.cuda.mem_get_info(device)[1]
    elif hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        held = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        return
    if needed > held:
        raise MemoryError(f"{by} needs {in_words(needed)} for {what}, {device} has {in_words(held)}: {advice}")


def rows_within(budget: int, bytes_per_row: int, *, at_most: int) -> int:
    """How many rows of the given size fit the budget; always at least one."""
    return max(1, min(at_most, budget // max(bytes_per_row, 1)))
