"""One picture in place of the one before, where that is possible."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.live import Live


@contextmanager
def frames(console: Console) -> Iterator[Callable[[RenderableType], None]]:
    """Shows one frame in place of the one before; one after another where that is no terminal."""
    if not console.is_terminal:
        yield console.print
        return
    with Live(console=console, auto_refresh=False) as live:
        yield lambda frame: live.update(frame, refresh=True)
