"""Pause, continue, abort and flush: what the engine does with the requests it has."""

from __future__ import annotations

import asyncio

from phalanx.engine.engine import Engine
from phalanx.schema.control import Continue, Flush, Pause, PauseMode
from phalanx.server.lifecycle import Lifecycle
from phalanx.server.live import LiveRequests
from phalanx.server.operations.quiescence import Quiescence
from phalanx.server.operations.undertakings import Undertakings


class GenerationOperations:
    """Each may be asked for any number of times; what is done already changes nothing."""

    def __init__(
        self,
        engine: Engine,
        live: LiveRequests,
        lifecycle: Lifecycle,
        quiescence: Quiescence,
        undertakings: Undertakings,
    ) -> None:
        self._engine = engine
        self._live = live
        self._lifecycle = lifecycle
        self._quiescence = quiescence
        self._undertakings = undertakings

    @property
    def paused(self) -> bool:
        return self._quiescence.paused

    async def pause(self, mode: PauseMode) -> None:
        """Returns when it is done, with `ABORT` when the running requests have ended."""
        await self._undertakings.done(self._pause(mode))

    async def pause_when_idle(self) -> None:
        """Let the running requests end first; new ones wait from now on."""
        with self._quiescence.holding():
            await self._quiescence.settled()
            if not self._quiescence.paused:
                await self.pause(PauseMode.IN_PLACE)

    async def go_on(self) -> None:
        await self._undertakings.done(self._go_on())

    async def _pause(self, mode: PauseMode) -> None:
        await asyncio.to_thread(self._engine.control, Pause(mode))
        self._quiescence.note_pause(mode)

    async def _go_on(self) -> None:
        await asyncio.to_thread(self._engine.control, Continue())
        self._quiescence.note_continue()

    def abort(self, prefix: str) -> int:
        """End the requests with an id that begins so; they answer with what they have."""
        return self._live.abort(prefix)

    async def flush(self, wait_s: float = 0.0) -> bool:
        """Drop what is cached of ended requests; False while any runs, waits or is handed over."""
        if wait_s > 0:
            await self._lifecycle.idle(wait_s)
        return await asyncio.to_thread(self._engine.control, Flush())
