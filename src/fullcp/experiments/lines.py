"""A CSV file that grows by whole groups of lines: what an interruption leaves of a group is cut off."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path


class LineFile:
    """Lines of known columns.

    Each group is one write to the end of the file. A last line without its end is what an interrupted write left, and
    lines without their group's end mark are as well; both are dropped before anything is read or added.
    """

    def __init__(self, path: Path, columns: Sequence[str]):
        self.path, self.columns = path, tuple(columns)

    def read(self) -> list[dict[str, str]]:
        """All lines of whole groups."""
        if not self.path.exists():
            return []
        text = self._whole()
        lines = [line for line in text.splitlines() if line and line != _END]
        return list(csv.DictReader(io.StringIO("\n".join(lines))))

    def append(self, lines: Sequence[Mapping[str, object]]) -> None:
        """Add a group of lines."""
        if not lines:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        whole = self._whole() if self.path.exists() else ""
        if self.path.exists() and self.path.stat().st_size > len(whole.encode()):
            os.truncate(self.path, len(whole.encode()))
        text = io.StringIO()
        writer = csv.DictWriter(text, fieldnames=self.columns, lineterminator="\n")
        if not whole:
            writer.writeheader()
        writer.writerows(lines)
        with self.path.open("a", newline="") as file:
            file.write(text.getvalue() + _END + "\n")

    def _whole(self) -> str:
        """The file up to its last whole group."""
        with self.path.open(newline="") as file:
            text = file.read()
        header = ",".join(self.columns)
        if text and not text.startswith(header[: len(text)]):
            raise ValueError(f"{self.path} has other columns than {header}: name another run folder")
        end = text.rfind(_END + "\n")
        return "" if end < 0 else text[: end + len(_END) + 1]


_END = "#"
