"""A request's output for a reading thread: an iterator of deltas that ends in the output."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, Self, TypeVar

from phalanx.clock import Clock
from phalanx.engine.requests import LiveRequest
from phalanx.engine.sinks import Output, UnreadEvents, Wakeable
from phalanx.errors import PhalanxError
from phalanx.plugin import Delta, Failed, Final


class ThreadSink:
    """Keeps events for a reading thread and wakes it."""

    mailbox: Wakeable | None = None

    def __init__(self, clock: Clock) -> None:
        self.unread = UnreadEvents(clock)
        self._arrived = threading.Event()

    @property
    def waiting_since_s(self) -> float | None:
        return self.unread.waiting_since_s

    def claim(self) -> bool:
        return True

    def schedule(self, now_s: float) -> None:
        pass

    def put(self, event: Output, now_s: float) -> None:
        self.unread.append(event, now_s)
        self._arrived.set()

    def withdraw(self, error: PhalanxError, now_s: float) -> None:
        self.put(Failed("", error), now_s)

    def next(self) -> Output:
        """The next event; waits for it."""
        while True:
            # Cleared before looking, so that an event which arrives meanwhile ends the wait.
            self._arrived.clear()
            event = self.unread.take()
            if event is not None:
                return event
            self._arrived.wait()


class _Sink(Protocol):
    @property
    def unread(self) -> UnreadEvents: ...


S = TypeVar("S", bound=_Sink)


class RequestStream(Generic[S]):
    """What the streams of threads and of coroutines have in common."""

    def __init__(self, live: LiveRequest, sink: S, cancel: Callable[[], bool]) -> None:
        self._live = live
        self._sink = sink
        self._over = False
        self._release = weakref.finalize(self, cancel_unended, sink.unread, cancel)
        self._release.atexit = False

    @property
    def rid(self) -> str:
        return self._live.rid

    @property
    def queue_time_s(self) -> float | None:
        """From submit to the request's first step; None until then."""
        return self._live.queue_time_s

    def _taken(self, event: Output) -> Any:
        """What `event` is to the reader; its error is raised."""
        match event:
            case Delta(payload=payload):
                return payload
            case Final(payload=payload):
                self._end()
                return payload
            case Failed(error=error):
                self._end()
                raise error

    def _end(self) -> None:
        self._over = True
        self._release()


class ResponseStream(RequestStream[ThreadSink]):
    """Deltas of one request, then its complete output as the last item.

    For one reader. A failed request raises its error in place of the output. Closing or dropping
    the stream before its end cancels the request; use it as a context manager.
    """

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._over:
            raise StopIteration
        return self._taken(self._sink.next())

    def close(self) -> None:
        """End reading; cancels the request where it has not ended."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def cancel_unended(unread: UnreadEvents, cancel: Callable[[], bool]) -> None:
    """Cancel a request whose reader is gone; runs where the garbage collector does: no locks."""
    if not unread.ended:
        cancel()
