"""A request's output for a reading coroutine: the asyncio twin of `ResponseStream`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Self

from phalanx.clock import Clock
from phalanx.engine.mailbox import Mailbox
from phalanx.engine.requests import LiveRequest
from phalanx.engine.sinks import Output, UnreadEvents, Wakeable
from phalanx.engine.streams import RequestStream, cancel_unended
from phalanx.errors import PhalanxError
from phalanx.plugin import Failed


class AsyncSink:
    """Keeps events for a coroutine and has its event loop woken through the mailbox."""

    def __init__(self, mailbox: Mailbox, clock: Clock) -> None:
        self.unread = UnreadEvents(clock)
        self.mailbox: Wakeable | None = mailbox
        self._mailbox = mailbox
        self._waiter: asyncio.Future[None] | None = None

    @property
    def waiting_since_s(self) -> float | None:
        return self.unread.waiting_since_s

    def claim(self) -> bool:
        return True

    def schedule(self, now_s: float) -> None:
        pass

    def put(self, event: Output, now_s: float) -> None:
        # Appended before the waiter is looked at; `next` does both the other way round.
        self.unread.append(event, now_s)
        if self._waiter is not None:
            self._mailbox.add(self)

    def withdraw(self, error: PhalanxError, now_s: float) -> None:
        self.put(Failed("", error), now_s)

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self) -> Output:
        """The next event; waits for it."""
        while True:
            event = self.unread.take()
            if event is not None:
                return event
            self._waiter = self._mailbox.loop.create_future()
            try:
                event = self.unread.take()
                if event is not None:
                    return event
                await self._waiter
            finally:
                self._waiter = None


class AsyncResponseStream(RequestStream[AsyncSink]):
    """Deltas of one request, then its complete output as the last item.

    For one reader, in the event loop that it was made in. Closing or dropping the stream before
    its end cancels the request; use it as an asynchronous context manager.
    """

    def __init__(self, live: LiveRequest, sink: AsyncSink, cancel: Callable[[], bool]) -> None:
        super().__init__(live, sink, cancel)
        self._cancel = cancel

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        if self._over:
            raise StopAsyncIteration
        return self._taken(await self._sink.next())

    def cancel(self) -> None:
        """Cancel the request; the stream goes on to its last item."""
        cancel_unended(self._sink.unread, self._cancel)

    async def aclose(self) -> None:
        """End reading; cancels the request where it has not ended."""
        self._end()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._end()
