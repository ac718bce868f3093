"""Where one request's output goes: the loop puts events in, and never waits for a reader."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from typing import Any, Protocol

from phalanx.clock import Clock
from phalanx.errors import PhalanxError
from phalanx.plugin import Delta, Failed, Final, MergeableDelta

Output = Delta | Final | Failed


class Wakeable(Protocol):
    """What several sinks share that must be woken once after a step's events were put."""

    def wake(self) -> bool:
        """From any thread; False where its readers are gone."""
        ...


class Sink(Protocol):
    """The receiving end of one request.

    `claim`, then any number of deltas and one final or failed event; or `withdraw` alone.
    """

    @property
    def waiting_since_s(self) -> float | None:
        """Since when output has been waiting for the reader (None: nothing waits)."""
        ...

    @property
    def mailbox(self) -> Wakeable | None:
        """What must be woken after events were put, or None."""
        ...

    def claim(self) -> bool:
        """The request is about to start; False where its owner has cancelled it."""
        ...

    def schedule(self, now_s: float) -> None:
        """The request's first step begins."""
        ...

    def put(self, event: Output, now_s: float) -> None:
        """Hand over an event; what comes after a final or failed one is dropped."""
        ...

    def withdraw(self, error: PhalanxError, now_s: float) -> None:
        """The request will never start."""
        ...


class FutureSink:
    """Resolves a standard future with the complete output."""

    waiting_since_s: float | None = None
    mailbox: Wakeable | None = None

    def __init__(self) -> None:
        self.future: Future[Any] = Future()

    def claim(self) -> bool:
        return self.future.set_running_or_notify_cancel()

    def schedule(self, now_s: float) -> None:
        pass

    def put(self, event: Output, now_s: float) -> None:
        match event:
            case Final(payload=payload):
                self.future.set_result(payload)
            case Failed(error=error):
                self.future.set_exception(error)
            case Delta():
                pass

    def withdraw(self, error: PhalanxError, now_s: float) -> None:
        self.future.cancel()
        self.future.set_running_or_notify_cancel()


class CallerSink(FutureSink):
    """A waiting `step` caller: its future is seen by nobody else, a withdrawal is an error."""

    def withdraw(self, error: PhalanxError, now_s: float) -> None:
        self.future.set_exception(error)


class QuietSink:
    """Stands before the sink of a rank that does not answer: its output is None."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self.mailbox = sink.mailbox

    @property
    def waiting_since_s(self) -> float | None:
        return self._sink.waiting_since_s

    def claim(self) -> bool:
        return self._sink.claim()

    def schedule(self, now_s: float) -> None:
        self._sink.schedule(now_s)

    def put(self, event: Output, now_s: float) -> None:
        match event:
            case Final(rid=rid, cancelled=cancelled):
                self._sink.put(Final(rid, None, cancelled), now_s)
            case Failed():
                self._sink.put(event, now_s)
            case Delta():
                pass

    def withdraw(self, error: PhalanxError, now_s: float) -> None:
        self._sink.withdraw(error, now_s)


class UnreadEvents:
    """Events that a stream's reader has not taken; deltas merge when it takes them.

    One thread appends, one other takes; both sides rely on deque operations being atomic.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._events: deque[Output] = deque()
        self._mergeable: type | None = None
        self.ended = False
        self.waiting_since_s: float | None = None

    def append(self, event: Output, now_s: float) -> None:
        if self.ended:
            return
        self.ended = not isinstance(event, Delta)
        if self.waiting_since_s is None:
            self.waiting_since_s = now_s
        self._events.append(event)

    def take(self) -> Output | None:
        """The oldest event, joined with its neighbours where both are deltas that merge."""
        events = self._events
        if not events:
            return None
        event = events.popleft()
        while isinstance(event, Delta) and events:
            joined = self._joined(event, events[0])
            if joined is None:
                break
            event = joined
            events.popleft()
        self.waiting_since_s = self._clock.monotonic_s() if events else None
        return event

    def _joined(self, earlier: Delta, later: Output) -> Delta | None:
        payload = earlier.payload
        if not isinstance(later, Delta) or type(later.payload) is not type(payload):
            return None
        # Asking a Protocol is slow, so the answer is kept for the class.
        if type(payload) is not self._mergeable:
            if not isinstance(payload, MergeableDelta):
                return None
            self._mergeable = type(payload)
        joined = payload.merged(later.payload)
        return None if joined is None else Delta(earlier.rid, joined)
