"""The servers that this gateway sends requests to, as everything on its event loop sees them.

A request takes a ticket, tells how it ended, and releases it: that is what in-flight counts, health
and the reports of the gateway come from.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from phalanx.clock import Clock
from phalanx.gateway.traffic import Traffic
from phalanx.routing.endpoint import Scheme
from phalanx.routing.load import Ticket as Place
from phalanx.routing.pool_registry import PoolRegistry
from phalanx.routing.resolver import Selector
from phalanx.routing.snapshot import Server, ServerState, Snapshot

NUM_EVENTS = 100
Ended = Callable[[Server, str, float, float | None, str], None]
"""The server, the code, the duration, the model's own time where it is known, and a message."""


@dataclass(frozen=True)
class PoolEvent:
    """A server came, went, or changed its state."""

    wall_s: float
    server_id: str
    model_name: str
    endpoint: str
    state: ServerState | None
    detail: str


class Ticket:
    """One request at one server, from `Pool.acquire` to `release`."""

    __slots__ = ("_code", "_ended", "_message", "_place", "_served_s", "_started_s", "server")

    def __init__(self, place: Place, started_s: float, ended: Callable[[Ticket], None]) -> None:
        self.server: Server = place.server
        self._place = place
        self._started_s = started_s
        self._ended: Callable[[Ticket], None] | None = ended
        self._code, self._message = "CANCELLED", ""
        self._served_s: float | None = None

    def outcome(self, code: str, *, served_s: float | None = None, message: str = "") -> None:
        """What the request came to: a gRPC status by name, or an HTTP status in digits.

        `served_s` is the time that the server says its model took. Without an outcome the request
        was left by its caller.
        """
        self._code, self._served_s, self._message = code, served_s, message

    def release(self) -> None:
        """The request has left the server. To be called however it ends; twice is once."""
        ended, self._ended = self._ended, None
        if ended is not None:
            ended(self)

    def __enter__(self) -> Ticket:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class Pool:
    """Belongs to the gateway's event loop. `registry` may be told things by that loop alone."""

    def __init__(self, registry: PoolRegistry, clock: Clock) -> None:
        self.registry = registry
        self.traffic = Traffic(clock)
        self._clock = clock
        self._shown = registry.publisher.snapshot
        self._changed = asyncio.Event()
        self._closed = False
        self._events: deque[PoolEvent] = deque(maxlen=NUM_EVENTS)
        self._observers: tuple[Ended, ...] = (self.traffic.ended,)
        registry.publisher.listen(self._published)

    @property
    def snapshot(self) -> Snapshot:
        return self.registry.publisher.snapshot

    @property
    def events(self) -> tuple[PoolEvent, ...]:
        """The latest changes, the newest last."""
        return tuple(self._events)

    def acquire(
        self, model: str | None, scheme: Scheme, exclude: frozenset[str] = frozenset()
    ) -> Ticket:
        """Choose a ready server of `model` and count the request there, in one step.

        `model` None means the only model of the scheme; `exclude` are ids of servers that the
        request has been tried at. Raises `UnknownModelError`, or `NoServerError` where no server is
        ready. The caller releases the ticket whatever happens.
        """
        place = self.registry.acquire(Selector(scheme, model), exclude)
        return Ticket(place, self._clock.monotonic_s(), self._left)

    def connect_failed(self, server_id: str, detail: str = "no connection") -> None:
        """A request could not be sent for want of a connection: the server is down from now on."""
        self.registry.connect_failed(server_id, detail)

    def observe_requests(self, observer: Ended) -> None:
        """Tell `observer` of every request that leaves a server."""
        self._observers = (*self._observers, observer)

    async def watch(self, after: int, wait_s: float, epoch: str | None = None) -> Snapshot:
        """The snapshot once it is another than that of revision `after` (and of `epoch`), or when
        `wait_s` have passed or the gateway closes.
        """
        try:
            async with asyncio.timeout(wait_s):
                while not self._closed and self.snapshot.revision == after:
                    if epoch not in (None, self.snapshot.epoch):
                        break
                    await self._changed.wait()
        except TimeoutError:
            pass
        return self.snapshot

    def close(self) -> None:
        """Answer everybody who watches; nobody waits any more."""
        self._closed = True
        self._changed.set()

    def _left(self, ticket: Ticket) -> None:
        duration_s = self._clock.monotonic_s() - ticket._started_s
        for observer in self._observers:
            observer(ticket.server, ticket._code, duration_s, ticket._served_s, ticket._message)
        ticket._place.release()

    def _published(self, snapshot: Snapshot) -> None:
        before, self._shown = self._shown.by_id, snapshot
        now_s = self._clock.wall_s()
        for server in snapshot.servers:
            known = before.get(server.server_id)
            if known is not server and (known is None or known.state is not server.state):
                self._events.append(_event(now_s, server, server.state))
        for server in before.values():
            if server.server_id not in snapshot.by_id:
                self._events.append(_event(now_s, server, None))
                self.traffic.keep(frozenset(snapshot.by_id))
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _event(now_s: float, server: Server, state: ServerState | None) -> PoolEvent:
    detail = server.detail if state is not None else ""
    return PoolEvent(
        now_s, server.server_id, server.model_name, str(server.endpoint), state, detail
    )
