"""The commands behind `fullcp`, a file a family; `cli` imports this once typer is known to be there."""

from fullcp.commands import boxes, compare, demo, evaluate, figures, reproduce
from fullcp.commands.app import app

__all__ = ["app", "boxes", "compare", "demo", "evaluate", "figures", "reproduce"]
