"""The events of one streamed answer, read by `async for`."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Self

from phalanx.client.roles.answers import JsonObject, event_failure, json_object
from phalanx.client.roles.event_lines import DONE, EventLines
from phalanx.client.roles.routed_calls import StartedAnswer
from phalanx.client.roles.running_calls import RunningCalls
from phalanx.errors import EngineUnavailableError


class RoleStream:
    """JSON objects, in order, each as soon as it has come. Read by one task.

    The request is sent when the first one is asked for, and its deadline runs from then. Leaving
    `async with`, or `close`, before the end cancels it at the engine.
    """

    def __init__(
        self,
        start: Callable[[], Awaitable[StartedAnswer]],
        running: RunningCalls,
        timeout_s: float,
        what: str,
    ) -> None:
        self._start = start
        self._running = running
        self._timeout_s = timeout_s
        self._what = what
        self._end_s = 0.0
        self._begun: tuple[StartedAnswer, AsyncGenerator[bytes, None]] | None = None
        self._ended = False
        self._lines = EventLines()
        self._events: deque[bytes] = deque()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> JsonObject:
        """Raises as `AsyncRoleClient.generate` does, also in the middle."""
        if self._ended:
            raise StopAsyncIteration
        try:
            event = await self._next()
        except BaseException:
            await self.close()
            raise
        if event is None:
            await self.close()
            raise StopAsyncIteration
        return event

    async def close(self) -> None:
        """Any number of times."""
        self._ended = True
        begun, self._begun = self._begun, None
        if begun is not None:
            started, parts = begun
            try:
                await parts.aclose()
            finally:
                await started.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def _next(self) -> JsonObject | None:
        if self._begun is None:
            self._end_s = asyncio.get_running_loop().time() + self._timeout_s
        async with self._running.call(self._end_s, self._what):
            if self._begun is None:
                started = await self._start()
                self._begun = started, started.parts()
            data = await self._data(self._begun[1])
        if data == DONE:
            return None
        event = json_object(self._what, data)
        failure = event_failure(event)
        if failure is not None:
            raise failure
        return event

    async def _data(self, parts: AsyncGenerator[bytes, None]) -> bytes:
        while not self._events:
            try:
                part = await anext(parts)
            except StopAsyncIteration:
                raise EngineUnavailableError(
                    f"{self._what} ended before it was complete; it has run, so it is not sent again"
                ) from None
            self._events.extend(self._lines.feed(part))
        return self._events.popleft()
