"""Arguments of a constructor: kept, told apart, shown."""

from __future__ import annotations

from copy import deepcopy
from os import PathLike, fspath
from typing import Any

import numpy as np
from torch import Tensor, nn

_SHORT = 1000


def kept_setting(value: Any) -> Any:
    """A copy of a setting that later changes do not reach."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, PathLike):
        return fspath(value)
    return value.item() if isinstance(value, np.generic) else deepcopy(value)


def is_plain(value: Any) -> bool:
    """Whether a setting is one that JSON holds as it is: a word, a number, or a short sequence of these (as a list)."""
    if isinstance(value, (list, tuple)):
        return len(value) <= _SHORT and all(is_plain(entry) and not isinstance(entry, (list, tuple)) for entry in value)
    return value is None or type(value) in (str, int, float, bool)


def brief(value: Any) -> str:
    """A short repr: an array by its length, a module by its kind."""
    if isinstance(value, nn.Module):
        return type(value).__name__
    size = getattr(value, "numel", lambda: getattr(value, "size", 1))()
    if isinstance(value, (list, tuple)):
        size = len(value)
    return repr(value) if not isinstance(size, int) or size <= 8 else f"<{size} values>"
