"""Where the command line prints tables: a terminal as wide as it is, or whole lines for programs."""

from __future__ import annotations

from rich.console import Console

_WIDTH = 10_000


def table_console() -> Console:
    """Where nobody looks, whoever reads it wants whole lines."""
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH)
