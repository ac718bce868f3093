"""The servers that this gateway sends requests to, as everything on its event loop sees them.

A request takes a ticket, tells how it ended, and releases it: that is what in-flight counts, health
and the reports of the gateway come from.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from phalanx.clock import Clock
from phalanx.gateway.traffic import Traffic
from phalanx.routing.endpoint import Scheme
from phalanx.routing.load import Ticket
from phalanx.routing.pool_registry import PoolRegistry
from phalanx.routing.resolver import Selector
from phalanx.routing.snapshot import Server, ServerState, Snapshot

NUM_EVENTS = 100


@dataclass(frozen=True)
class PoolEvent:
    """A server came, went, or changed its state."""

    wall_s: float
    server_id: str
    model_name: str
    endpoint: str
    state: ServerState | None
    detail: str


class Pool:
    """Belongs to the gateway's event loop. `registry` may be told things by that loop alone."""

    def __init__(self, registry: PoolRegistry, clock: Clock) -> None:
        self.registry = registry
        self.traffic = Traffic(clock)
        self._clock = clock
        self._shown = registry.publisher.snapshot
        self._ready = self._shown.ready
        self._acquire = registry.load.acquire
        self._changed = asyncio.Event()
        self._closed = False
        self._events: deque[PoolEvent] = deque(maxlen=NUM_EVENTS)
        registry.load.listen(self.traffic.ended)
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
        if model is not None:
            ready = self._ready.get((model, scheme))
            if ready is not None:  # what `resolve` would give
                return self._acquire(ready, exclude)
        return self.registry.acquire(Selector(scheme, model), exclude)

    def connect_failed(self, server_id: str, detail: str = "no connection") -> None:
        """A request could not be sent for want of a connection: the server is down from now on."""
        self.registry.connect_failed(server_id, detail)

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

    def _published(self, snapshot: Snapshot) -> None:
        before, self._shown = self._shown.by_id, snapshot
        self._ready = snapshot.ready
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
