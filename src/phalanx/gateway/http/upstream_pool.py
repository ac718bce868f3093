"""Connections to backends that wait for their next exchange, and new ones."""

from __future__ import annotations

import asyncio
import select

from phalanx.gateway.http.limits import HttpLimits
from phalanx.gateway.http.upstream import Upstream
from phalanx.gateway.http.whole_message import KnownHeads
from phalanx.routing.snapshot import Server


class UpstreamPool:
    """Idle connections by server, the one used last first. Belongs to one event loop."""

    def __init__(self, limits: HttpLimits) -> None:
        self._limits = limits
        self._heads = KnownHeads()
        self._idle: dict[str, list[Upstream]] = {}

    def idle(self, server_id: str) -> Upstream | None:
        """A connection that no exchange has, and that the backend has not closed as far as one
        can know.
        """
        waiting = self._idle.get(server_id)
        while waiting:
            upstream = waiting.pop()
            if self._usable(upstream):
                return upstream
            upstream.abort()
        return None

    async def connect(self, server: Server) -> Upstream:
        """A new one. Raises `OSError`, of which `TimeoutError` is one."""
        loop = asyncio.get_running_loop()
        endpoint = server.endpoint
        async with asyncio.timeout(self._limits.connect_timeout_s):
            _, upstream = await loop.create_connection(
                lambda: Upstream(loop, server.server_id, self, self._heads),
                endpoint.host,
                endpoint.port,
            )
        return upstream

    def put(self, upstream: Upstream) -> None:
        """Its exchange is over; keep it for the next."""
        waiting = self._idle.get(upstream.server_id)
        if waiting is None:
            waiting = self._idle[upstream.server_id] = []
        if len(waiting) >= self._limits.max_upstream_idle:
            upstream.abort()
            return
        upstream.rest(self._limits.upstream_idle_s)
        waiting.append(upstream)

    def dropped(self, upstream: Upstream) -> None:
        """It is closed, or about to be."""
        waiting = self._idle.get(upstream.server_id)
        if waiting and upstream in waiting:
            waiting.remove(upstream)
            if not waiting:
                del self._idle[upstream.server_id]

    def close(self) -> None:
        for waiting in list(self._idle.values()):
            for upstream in list(waiting):
                upstream.abort()
        self._idle.clear()

    def _usable(self, upstream: Upstream) -> bool:
        if upstream.lost or upstream.transport.is_closing():
            return False
        if upstream.rested_s() < self._limits.upstream_fresh_s:
            return True
        # What an idle backend sends is the end: better seen now than after the request was written.
        poll = select.poll()
        poll.register(upstream.transport.get_extra_info("socket").fileno(), select.POLLIN)
        return not poll.poll(0)
