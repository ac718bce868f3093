"""The accepted requests that have not ended, and the counts of those that have.

Each accepted request ends exactly once: whoever removes it from the table ends it.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import assert_never

import msgspec

from phalanx.clock import Clock
from phalanx.engine.door import Door
from phalanx.engine.replicas import ReplicaAccount, ReplicaChooser, totals
from phalanx.engine.sinks import Sink, Wakeable
from phalanx.engine_config import RuntimeConfig
from phalanx.errors import (
    EngineAsleepError,
    EngineOverloadedError,
    EngineUnavailableError,
    InvalidRequestError,
    PhalanxError,
    RequestFailedError,
    StreamStalledError,
)
from phalanx.plugin import Delta, Event, Failed, Final, Scheduled
from phalanx.schema.statistics import EngineMemory, EngineStatistics, LoopStatistics

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class LiveRequest:
    """One accepted request; `number` tells it from another request with the same id.

    `account` is its replica's. `claimed`: it has reached the plugin. `cancelled`: its cancel was
    asked for.
    """

    rid: str
    number: int
    account: ReplicaAccount
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

    def __init__(self, clock: Clock, runtime: RuntimeConfig, num_replicas: int = 1) -> None:
        self._clock = clock
        opened_s = clock.monotonic_s()
        self._accounts = tuple(ReplicaAccount(index, opened_s) for index in range(num_replicas))
        self._chooser = ReplicaChooser(self._accounts)
        self._max_live = runtime.max_pending_requests
        self._stall_timeout_s = runtime.stall_timeout_s
        self._lock = threading.Lock()
        self._live: dict[str, LiveRequest] = {}
        self._door = Door()
        self._numbers = itertools.count()
        self._fresh_names = itertools.count()
        self._prefix = secrets.token_hex(8)
        self._refusal: EngineUnavailableError | None = None
        self._accepted = self._refused = 0

    def find(self, rid: str) -> LiveRequest | None:
        return self._live.get(rid)

    def accept(self, rid: str, sink: Sink) -> LiveRequest:
        """Take a request in and choose its replica, or raise: then it was never started."""
        now_s = self._clock.monotonic_s()
        with self._lock:
            if self._refusal is not None:
                raise self.unavailable()
            asleep = self._door.refusal()
            if asleep is not None:
                self._refused += 1
                raise asleep
            if rid in self._live:
                self._refused += 1
                raise InvalidRequestError(
                    f"rid {rid!r} belongs to a request that has not ended; choose another",
                    field="rid",
                )
            if len(self._live) >= self._max_live:
                self._refused += 1
                raise _overloaded(len(self._live), self._max_live)
            account = self._chooser.choose()
            if account is None:
                raise EngineUnavailableError("no replica is healthy; create a new engine")
            account.enter(now_s)
            live = LiveRequest(rid, next(self._numbers), account, sink, now_s)
            self._live[rid] = live
            self._accepted += 1
            return live

    def fresh_rid(self) -> str:
        """An id for a request whose caller gave none; no other engine gives it."""
        return f"{self._prefix}-{next(self._fresh_names)}"

    def open(self) -> None:
        """The replicas are loaded: their time of service begins now."""
        now_s = self._clock.monotonic_s()
        with self._lock:
            for account in self._accounts:
                account.opened_s = now_s

    def count_refused(self) -> None:
        """One more request was refused by `validate`."""
        with self._lock:
            self._refused += 1

    def claim(self, live: LiveRequest) -> bool:
        """The request is about to reach the plugin; False where it must not any more."""
        with self._lock:
            if self._live.get(live.rid) is not live:
                return False
            if live.claimed:
                return True
            live.claimed = True
            if live.sink.claim():
                return True
            self._drop(live, self._clock.monotonic_s())
            live.account.num_cancelled += 1
            return False

    def reject(self, live: LiveRequest) -> None:
        """The request was accepted and could not be handed on: it counts as refused."""
        with self._lock:
            if self._live.get(live.rid) is live:
                self._drop(live, self._clock.monotonic_s())
                self._accepted -= 1
                self._refused += 1

    def schedule(self, live: LiveRequest, ago_s: float = 0.0) -> None:
        """The request's first step begins, or began `ago_s` seconds ago."""
        now_s = max(self._clock.monotonic_s() - ago_s, live.submitted_s)
        live.scheduled_s = now_s
        with self._lock:
            live.account.start(now_s - live.submitted_s)
        live.sink.schedule(now_s)

    def deliver(self, events: Iterable[Event]) -> list[LiveRequest]:
        """Pass a step's events on; returns the requests whose reader is gone, to be cancelled."""
        now_s = self._clock.monotonic_s()
        gone: list[LiveRequest] = []
        mailboxes: set[Wakeable] = set()
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
        """End a request that has not reached the plugin: its future becomes cancelled.

        Unless it was claimed all the same, since other ranks may compute it: then it fails.
        """
        if live.claimed:
            self.end(live, Failed(live.rid, error))
        elif self._remove(live):
            live.sink.withdraw(error, self._clock.monotonic_s())
            if live.sink.mailbox is not None:
                self._wake({live.sink.mailbox})

    def begin_sleep(self, *, only_idle: bool) -> bool:
        """Take no requests until `end_sleep`; False, and nothing is changed, where some are live
        and the engine may only fall asleep without any.
        """
        with self._lock:
            if only_idle and self._live:
                return False
            self._door.begin_sleep()
            return True

    def end_sleep(self) -> None:
        with self._lock:
            self._door.end_sleep()

    def settle(self, read: Callable[[], EngineMemory]) -> None:
        """Take requests from now on, or none, as what is held of memory now allows."""
        with self._lock:  # so that who reads last decides
            self._door.settle(read())

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

    def statistics(self, loops: Sequence[LoopStatistics | None]) -> EngineStatistics:
        """Counts in all and of each replica; `loops` are the replicas' newest loop counters."""
        now_s = self._clock.monotonic_s()
        with self._lock:
            return msgspec.structs.replace(
                totals(self._accounts, loops, now_s),
                num_accepted=self._accepted,
                num_refused=self._refused,
                num_in_flight=len(self._live),
            )

    def carried(
        self, live: LiveRequest, *, request_bytes: int = 0, response_bytes: int = 0
    ) -> None:
        """A request's payload, or a part of its answer, crossed to or from another process."""
        with self._lock:
            if request_bytes:
                live.account.carry(request_bytes)
            live.account.response_bytes += response_bytes

    def _remove(self, live: LiveRequest) -> bool:
        with self._lock:
            if self._live.get(live.rid) is not live:
                return False
            self._drop(live, self._clock.monotonic_s())
            live.account.num_cancelled += 1
            return True

    def _drop(self, live: LiveRequest, now_s: float) -> None:
        """Take a live request out; the lock is held."""
        del self._live[live.rid]
        live.account.leave(now_s)

    def _end(self, live: LiveRequest, event: Final | Failed, now_s: float) -> None:
        account = live.account
        with self._lock:
            if self._live.get(live.rid) is not live:
                return
            self._drop(live, now_s)
            startable = live.claimed or live.sink.claim()
            if not startable:
                account.num_cancelled += 1
            elif isinstance(event, Failed):
                account.num_failed += 1
            elif event.cancelled:
                account.num_cancelled += 1
            else:
                account.num_completed += 1
            if live.scheduled_s is not None:
                account.execution_time_s += now_s - live.scheduled_s
        if startable:
            live.sink.put(event, now_s)

    def _stalled(self, live: LiveRequest, now_s: float) -> bool:
        since_s = live.sink.waiting_since_s
        if since_s is None or now_s - since_s <= self._stall_timeout_s or live.cancelled:
            return False
        error = _stall_error(live.rid, now_s - since_s, self._stall_timeout_s)
        live.sink.put(Failed(live.rid, error), now_s)
        return True

    def _wake(self, mailboxes: Iterable[Wakeable]) -> list[LiveRequest]:
        closed = {mailbox for mailbox in mailboxes if not mailbox.wake()}
        if not closed:
            return []
        return [live for live in self.live_requests() if live.sink.mailbox in closed]


def _overloaded(num_live: int, limit: int) -> EngineOverloadedError:
    return EngineOverloadedError(
        f"{num_live} requests are pending, as many as max_pending_requests={limit} allows; try "
        "again later"
    )


def _stall_error(rid: str, waited_s: float, limit_s: float) -> StreamStalledError:
    return StreamStalledError(
        f"request {rid!r} was cancelled: its output has been waiting for {waited_s:.1f} s, longer "
        f"than stall_timeout_s={limit_s:g}"
    )


def _request_failure(error: Exception) -> Exception:
    if isinstance(error, RequestFailedError | InvalidRequestError | EngineAsleepError):
        return error
    failure = RequestFailedError(str(error) or type(error).__name__)
    failure.__cause__ = error
    return failure
