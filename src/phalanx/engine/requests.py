"""The accepted requests that have not ended, and the counts of those that have.

Each accepted request ends exactly once: whoever removes it from the table ends it.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import assert_never

from phalanx.clock import Clock
from phalanx.engine.mailbox import Mailbox
from phalanx.engine.sinks import Sink
from phalanx.engine_config import RuntimeConfig
from phalanx.errors import (
    EngineOverloadedError,
    EngineUnavailableError,
    InvalidRequestError,
    PhalanxError,
    RequestFailedError,
    StreamStalledError,
)
from phalanx.plugin import Delta, Event, Failed, Final, Scheduled
from phalanx.schema.statistics import EngineStatistics, LoopStatistics

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class LiveRequest:
    """One accepted request; `number` tells it from another request with the same id.

    `claimed`: it has reached the plugin. `cancelled`: its cancel was asked for.
    """

    rid: str
    number: int
    sink: Sink
    submitted_s: float
    scheduled_s: float | None = None
    claimed: bool = False
    cancelled: bool = False

    @property
    def queue_time_s(self) -> float | None:
        """From submit to the first step; None until then."""
        return None if self.scheduled_s is None else self.scheduled_s - self.submitted_s


class RequestTable:
    """Live requests by id; safe to use from any thread."""

    def __init__(self, clock: Clock, runtime: RuntimeConfig) -> None:
        self._clock = clock
        self._max_live = runtime.max_pending_requests
        self._stall_timeout_s = runtime.stall_timeout_s
        self._lock = threading.Lock()
        self._live: dict[str, LiveRequest] = {}
        self._numbers = itertools.count()
        self._refusal: EngineUnavailableError | None = None
        self._accepted = self._completed = self._failed = self._cancelled = self._refused = 0
        self._queue_time_s = self._execution_time_s = 0.0

    def find(self, rid: str) -> LiveRequest | None:
        return self._live.get(rid)

    def accept(self, rid: str, sink: Sink) -> LiveRequest:
        """Take a request in, or raise: then it was never started."""
        now_s = self._clock.monotonic_s()
        with self._lock:
            if self._refusal is not None:
                raise self.unavailable()
            if rid in self._live:
                self._refused += 1
                raise InvalidRequestError(
                    f"rid {rid!r} belongs to a request that has not ended; choose another",
                    field="rid",
                )
            if len(self._live) >= self._max_live:
                self._refused += 1
                raise EngineOverloadedError(
                    f"{len(self._live)} requests are pending, as many as max_pending_requests="
                    f"{self._max_live} allows; try again later"
                )
            live = LiveRequest(rid, next(self._numbers), sink, now_s)
            self._live[rid] = live
            self._accepted += 1
            return live

    def count_refused(self) -> None:
        """One more request was refused by `validate`."""
        with self._lock:
            self._refused += 1

    def claim(self, live: LiveRequest) -> bool:
        """The request is about to reach the plugin; False where it must not any more."""
        with self._lock:
            if self._live.get(live.rid) is not live:
                return False
            live.claimed = True
            if live.sink.claim():
                return True
            del self._live[live.rid]
            self._cancelled += 1
            return False

    def schedule(self, live: LiveRequest) -> None:
        """The request's first step begins."""
        live.scheduled_s = self._clock.monotonic_s()
        with self._lock:
            self._queue_time_s += live.scheduled_s - live.submitted_s

    def deliver(self, events: Iterable[Event]) -> list[LiveRequest]:
        """Pass a step's events on; returns the requests whose reader is gone, to be cancelled."""
        now_s = self._clock.monotonic_s()
        gone: list[LiveRequest] = []
        mailboxes: set[Mailbox] = set()
        for event in events:
            live = self._live.get(event.rid)
            if live is None:
                logger.error("the plugin reported %r of a request that is not live", event)
                continue
            match event:
                case Delta():
                    if self._stalled(live, now_s):
                        gone.append(live)
                    live.sink.put(event, now_s)
                case Scheduled():
                    self.schedule(live)
                case Final():
                    self._end(live, event, now_s)
                case Failed(error=error):
                    self._end(live, Failed(event.rid, _request_failure(error)), now_s)
                case _:
                    assert_never(event)
            if live.sink.mailbox is not None:
                mailboxes.add(live.sink.mailbox)
        return gone + self._wake(mailboxes)

    def end(self, live: LiveRequest, event: Final | Failed) -> None:
        """End one request with exactly this event."""
        self._end(live, event, self._clock.monotonic_s())
        if live.sink.mailbox is not None:
            self._wake({live.sink.mailbox})

    def withdraw(self, live: LiveRequest, error: PhalanxError) -> None:
        """End a request that has not reached the plugin: its future becomes cancelled."""
        if self._remove(live):
            with self._lock:
                self._cancelled += 1
            live.sink.withdraw(error, self._clock.monotonic_s())
            if live.sink.mailbox is not None:
                self._wake({live.sink.mailbox})

    def refuse(self, error: EngineUnavailableError) -> None:
        """Accept nothing from now on; the first reason stays."""
        with self._lock:
            if self._refusal is None:
                self._refusal = error

    @property
    def refusal(self) -> EngineUnavailableError | None:
        """The reason that `refuse` gave, None while requests are accepted."""
        return self._refusal

    def unavailable(self) -> EngineUnavailableError:
        """The reason that `refuse` gave; a fresh exception, since each caller raises its own."""
        reason = self._refusal
        error = EngineUnavailableError("the engine is closed" if reason is None else str(reason))
        error.__cause__ = None if reason is None else reason.__cause__
        return error

    def live_requests(self) -> list[LiveRequest]:
        with self._lock:
            return list(self._live.values())

    def statistics(self, loop: LoopStatistics | None) -> EngineStatistics:
        with self._lock:
            return EngineStatistics(
                num_accepted=self._accepted,
                num_completed=self._completed,
                num_failed=self._failed,
                num_cancelled=self._cancelled,
                num_refused=self._refused,
                num_in_flight=len(self._live),
                queue_time_s=self._queue_time_s,
                execution_time_s=self._execution_time_s,
                loop=loop,
            )

    def _remove(self, live: LiveRequest) -> bool:
        with self._lock:
            if self._live.get(live.rid) is not live:
                return False
            del self._live[live.rid]
            return True

    def _end(self, live: LiveRequest, event: Final | Failed, now_s: float) -> None:
        with self._lock:
            if self._live.get(live.rid) is not live:
                return
            del self._live[live.rid]
            startable = live.claimed or live.sink.claim()
            if not startable:
                self._cancelled += 1
            elif isinstance(event, Failed):
                self._failed += 1
            elif event.cancelled:
                self._cancelled += 1
            else:
                self._completed += 1
            if live.scheduled_s is not None:
                self._execution_time_s += now_s - live.scheduled_s
        if startable:
            live.sink.put(event, now_s)

    def _stalled(self, live: LiveRequest, now_s: float) -> bool:
        since_s = live.sink.waiting_since_s
        if since_s is None or now_s - since_s <= self._stall_timeout_s or live.cancelled:
            return False
        error = StreamStalledError(
            f"request {live.rid!r} was cancelled: its output has been waiting for "
            f"{now_s - since_s:.1f} s, longer than stall_timeout_s={self._stall_timeout_s:g}"
        )
        live.sink.put(Failed(live.rid, error), now_s)
        return True

    def _wake(self, mailboxes: Iterable[Mailbox]) -> list[LiveRequest]:
        closed = {mailbox for mailbox in mailboxes if not mailbox.wake()}
        if not closed:
            return []
        return [live for live in self.live_requests() if live.sink.mailbox in closed]


def _request_failure(error: Exception) -> Exception:
    if isinstance(error, RequestFailedError | InvalidRequestError):
        return error
    failure = RequestFailedError(str(error) or type(error).__name__)
    failure.__cause__ = error
    return failure
