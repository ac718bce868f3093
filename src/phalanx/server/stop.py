"""How a server is told to end."""

from __future__ import annotations

import asyncio


class Stop:
    """`asked` once it is to drain and end; `hurried` once it is not to wait for running requests."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.hurried = asyncio.Event()

    def ask(self) -> None:
        """The second time hurries."""
        if self.asked.is_set():
            self.hurried.set()
        self.asked.set()
