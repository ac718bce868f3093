"""An engine's memory, given back and taken again by tags."""

from __future__ import annotations

import asyncio

from phalanx.engine.engine import Engine
from phalanx.errors import InvalidRequestError, RequestFailedError
from phalanx.schema.control import MemoryTag, Sleep, Wake
from phalanx.schema.statistics import EngineMemory
from phalanx.server.operations.quiescence import Quiescence
from phalanx.server.operations.undertakings import Undertakings


class MemoryOperations:
    """Both may be asked for any number of times, in any order; what is done already stays."""

    def __init__(self, engine: Engine, quiescence: Quiescence, undertakings: Undertakings) -> None:
        self._engine = engine
        self._quiescence = quiescence
        self._undertakings = undertakings
        self._one_at_a_time = asyncio.Lock()

    async def release(self, tags: frozenset[MemoryTag]) -> None:
        """Returns when the memory is free. Raises `InvalidRequestError` while requests run, and
        `RequestFailedError` where nobody can say that it is free.
        """
        await self._undertakings.done(self._release(tags))

    async def resume(self, tags: frozenset[MemoryTag]) -> None:
        """Returns when the memory is there again; errors as those of `release`.

        Weights that others have replaced do not come back by it: the engine then waits for new ones.
        """
        await self._undertakings.done(self._resume(tags))

    async def _release(self, tags: frozenset[MemoryTag]) -> None:
        async with self._one_at_a_time:
            released, memory = await self._applied(Sleep(tags))
        if not released:
            raise InvalidRequestError(
                "memory was not released: requests are running, waiting or being handed over. "
                "Nothing has changed; pause generation or let them end (/flush_cache answers 200 "
                "then), and release again",
                field="tags",
            )
        kept = tags - memory.asleep
        if kept:
            raise _uncertain("was given back", kept)

    async def _resume(self, tags: frozenset[MemoryTag]) -> None:
        async with self._one_at_a_time:
            resumed, memory = await self._applied(Wake(tags))
        missing = tags & memory.asleep if resumed else tags
        if missing:
            raise _uncertain("was taken", missing)

    @property
    def state(self) -> EngineMemory:
        return self._engine.memory

    async def _applied(self, op: Sleep | Wake) -> tuple[bool, EngineMemory]:
        """Whether the engine did it, and what it holds since."""
        try:
            applied = await asyncio.to_thread(self._engine.control, op)
        finally:
            memory = self.state
            self._quiescence.note_asleep(bool(memory.asleep))
        return applied, memory


def _uncertain(what: str, tags: frozenset[MemoryTag]) -> RequestFailedError:
    return RequestFailedError(
        f"it is not certain that the memory of {', '.join(sorted(tags))} {what} on every replica; "
        "see memory in /server_info"
    )
