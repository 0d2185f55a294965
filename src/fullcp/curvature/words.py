"""The words for the structures of curvature."""

from __future__ import annotations

import re

from fullcp.inputs import check_choice

STRUCTURES = ("auto", "full", "kfac", "last_layer", "diagonal", "low_rank")
_RANKED = "low_rank"


def read_structure(curvature: object) -> tuple[str, int | None]:
    """One of `STRUCTURES`, and the rank that stands behind "low_rank:".

    Examples
    --------
    >>> read_structure("kfac"), read_structure("low_rank"), read_structure("low_rank:200")
    (('kfac', None), ('low_rank', None), ('low_rank', 200))
    """
    if isinstance(curvature, str) and curvature.startswith(f"{_RANKED}:"):
        rank = curvature.removeprefix(f"{_RANKED}:")
        if not re.fullmatch("[0-9]{1,9}", rank) or int(rank) == 0:
            raise ValueError(
                f"curvature must have a whole number of at least 1 behind '{_RANKED}:', as in '{_RANKED}:200', got "
                f"{curvature!r}"
            )
        return _RANKED, int(rank)
    check_choice("curvature", curvature, STRUCTURES)
    assert isinstance(curvature, str)
    return curvature, None


def check_structure(curvature: object) -> None:
    """Refuse what names no structure."""
    read_structure(curvature)
