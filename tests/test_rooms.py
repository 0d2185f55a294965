"""The house: data flows one way, so each room imports from rooms upstream of it only, and files stay readable."""

from __future__ import annotations

import ast
from pathlib import Path

import fullcp

SOURCE = Path(fullcp.__file__).parent
# Upstream first. A room may import from rooms to its left.
ROOMS = [
    ["files", "memory", "notices", "progress", "version"],
    ["sources"],
    ["inputs"],
    ["features"],
    ["curvature"],
    ["refinement", "tuning"],
    ["training"],
    ["influence"],
    ["regions"],
    ["calibration", "candidates", "pruning"],
    ["grouping"],
    ["engine"],
    ["joint", "leave_one_out"],
    ["predictors"],
    ["evaluation"],
    ["data"],
    ["plots", "report", "sklearn", "vision"],
    ["experiments"],
    ["commands"],
    ["cli"],
    ["__main__"],
]
LEVEL = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}


def room_of(path):
    parts = path.relative_to(SOURCE).parts
    return parts[0].removesuffix(".py")


def imported_rooms(path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module] if node.module != "fullcp" else [f"fullcp.{alias.name}" for alias in node.names]
            assert node.level == 0, f"{path}: relative import"
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            if name.startswith("fullcp."):
                yield name.split(".")[1]
            elif name == "fullcp":
                yield "fullcp"


def test_rooms_import_from_upstream_only():
    for path in SOURCE.rglob("*.py"):
        room = room_of(path)
        if room == "__init__":
            continue
        assert room in LEVEL, f"{path.name}: a new room must be placed in the flow"
        for other in imported_rooms(path):
            assert other in LEVEL, f"{path}: imports {other}"
            assert other == room or LEVEL[other] < LEVEL[room], f"{path}: {room} imports {other}, which is downstream"


def test_files_can_be_read_in_one_sitting():
    for path in SOURCE.rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 500, path
        assert path.stem not in {"utils", "helpers", "common", "misc"}


def test_importing_the_library_loads_nothing_heavy():
    import subprocess
    import sys

    heavy = ("scipy", "sklearn", "pandas", "matplotlib", "typer", "rich")
    code = f"import sys, fullcp; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"
