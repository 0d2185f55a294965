"""Progress on a terminal, silence in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def track(steps: Iterable[T], description: str, total: int | None) -> Iterator[T]:
    """Iterate over `steps`, showing a bar with the time left if there are several and a person is watching.

    Without a total, the bar shows that something happens, and how fast.
    """
    if (total is not None and total < 2) or not (sys.stderr.isatty() or "ipykernel" in sys.modules):
        yield from steps
        return
    from rich.console import Console
    from rich.progress import track as rich_track

    console = Console(stderr=True)
    watched = console.is_terminal or console.is_jupyter
    yield from rich_track(steps, description, total=total, console=console, transient=True, disable=not watched)
