"""Arguments of a constructor: kept, told apart, shown."""

from __future__ import annotations

from copy import deepcopy
from os import PathLike, fspath
from typing import Any

import numpy as np
from torch import Tensor, nn


def kept_setting(value: Any) -> Any:
    """A copy of a setting that later changes do not reach."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, PathLike):
        return fspath(value)
    return value.item() if isinstance(value, np.generic) else deepcopy(value)


def are_words(value: Any) -> bool:
    """Whether a setting is a sequence of words, which JSON holds as it is."""
    return isinstance(value, (list, tuple)) and all(isinstance(word, str) for word in value)


def brief(value: Any) -> str:
    """A short repr: an array by its length, a module by its kind."""
    if isinstance(value, nn.Module):
        return type(value).__name__
    size = getattr(value, "numel", lambda: getattr(value, "size", 1))()
    if isinstance(value, (list, tuple)):
        size = len(value)
    return repr(value) if not isinstance(size, int) or size <= 8 else f"<{size} values>"
