"""The entry point of the command line; `commands` has what it does."""

from __future__ import annotations

import sys
from importlib.util import find_spec


def main() -> None:
    """Run the command line, or say what it needs."""
    missing = [name for name in ("typer", "matplotlib", "sklearn") if find_spec(name) is None]
    if missing:
        sys.exit(f"fullcp: the command line needs {', '.join(missing)}; install with: pip install 'fullcp[cli]'")
    from fullcp.commands import app

    app()


if __name__ == "__main__":
    main()
