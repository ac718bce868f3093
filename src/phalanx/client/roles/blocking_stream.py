"""The events of one streamed answer for programs without an event loop, read by `for`."""

from __future__ import annotations

from contextlib import suppress
from typing import Self

from phalanx.client.roles.answers import JsonObject
from phalanx.client.roles.loop_thread import LoopThread
from phalanx.client.roles.role_stream import RoleStream
from phalanx.errors import EngineUnavailableError


class BlockingRoleStream:
    """As `RoleStream`, read by `for`."""

    def __init__(self, loop: LoopThread, stream: RoleStream) -> None:
        self._loop = loop
        self._stream = stream

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> JsonObject:
        event = self._loop.run(_next(self._stream))
        if event is None:
            raise StopIteration
        return event

    def close(self) -> None:
        """Cancels the request where it has not ended. Any number of times."""
        with suppress(EngineUnavailableError):  # the client is closed, and with it this
            self._loop.run(self._stream.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


async def _next(stream: RoleStream) -> JsonObject | None:
    return await anext(stream, None)
