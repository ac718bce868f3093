"""An engine's memory, given back and taken again by tags."""

from __future__ import annotations

import asyncio

from phalanx.engine.engine import Engine
from phalanx.errors import EngineUnavailableError, InvalidRequestError
from phalanx.schema.control import MemoryTag, Sleep, Wake
from phalanx.schema.statistics import EngineMemory
from phalanx.server.operations.quiescence import Quiescence


class MemoryOperations:
    """Both may be asked for any number of times, in any order; what is done already stays."""

    def __init__(self, engine: Engine, quiescence: Quiescence) -> None:
        self._engine = engine
        self._quiescence = quiescence

    async def release(self, tags: frozenset[MemoryTag]) -> None:
        """Returns when the memory is free. Raises `InvalidRequestError` while requests run."""
        if not await asyncio.to_thread(self._engine.control, Sleep(tags)):
            raise InvalidRequestError(
                "memory was not released: requests are running, waiting or being handed over. "
                "Nothing has changed; pause generation or let them end (/flush_cache answers 200 "
                "then), and release again",
                field="tags",
            )
        memory = self._noted()
        kept = tags - memory.asleep
        if kept:
            raise _uncertain("was given back", kept)

    async def resume(self, tags: frozenset[MemoryTag]) -> None:
        """Returns when the memory is there again.

        Weights that others have replaced do not come back by it: the engine then waits for new ones.
        """
        if not await asyncio.to_thread(self._engine.control, Wake(tags)):
            raise _uncertain("was taken", tags)
        missing = tags & self._noted().asleep
        if missing:
            raise _uncertain("was taken", missing)

    @property
    def state(self) -> EngineMemory:
        return self._engine.memory

    def _noted(self) -> EngineMemory:
        memory = self.state
        self._quiescence.note_asleep(bool(memory.asleep))
        return memory


def _uncertain(what: str, tags: frozenset[MemoryTag]) -> EngineUnavailableError:
    return EngineUnavailableError(
        f"it is not certain that the memory of {', '.join(sorted(tags))} {what} on every replica; "
        "see memory in /server_info"
    )
