"""Options that take several words: ``--datasets yacht boston``."""

from __future__ import annotations

import typer
from typer.core import TyperCommand


class Spread(TyperCommand):
    """A command whose list options take several words."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Give each word its option."""
        several = {o for p in self.params if getattr(p, "multiple", False) for o in p.opts}
        spread: list[str] = []
        option, taken = "", 0
        for word in args:
            if word.startswith("-"):
                option, taken = (word if word in several else ""), 0
            elif option:
                spread += [option] if taken else []
                taken += 1
            spread.append(word)
        return super().parse_args(ctx, spread)
