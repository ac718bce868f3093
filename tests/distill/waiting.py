"""Events that tests wait for."""

from __future__ import annotations

import asyncio


class Polls(list):
    """What discovery is asked; `seen` is set when somebody waits for a change."""

    def __init__(self) -> None:
        self.seen = asyncio.Event()

    def append(self, query: dict) -> None:
        super().append(query)
        if "after" in query:
            self.seen.set()
