"""Connections to backends that wait for their next exchange, and new ones."""

from __future__ import annotations

import asyncio
import errno
import select
import socket

from phalanx.gateway.http.limits import HttpLimits
from phalanx.gateway.http.upstream import Upstream
from phalanx.gateway.http.way import Place
from phalanx.gateway.http.whole_message import KnownHeads


class UpstreamPool:
    """Idle connections by the key of their place, the one used last first. Belongs to one event
    loop.
    """

    def __init__(self, limits: HttpLimits) -> None:
        self.limits = limits
        self._fresh_s, self._idle_s = limits.upstream_fresh_s, limits.upstream_idle_s
        self._heads = KnownHeads()
        self._idle: dict[str, list[Upstream]] = {}

    def idle(self, key: str) -> Upstream | None:
        """A connection that no exchange has, and that the backend has not closed as far as one
        can know.
        """
        waiting = self._idle.get(key)
        while waiting:
            upstream = waiting.pop()
            if not (upstream.lost or upstream.transport.is_closing()) and (
                upstream.rested_s() < self._fresh_s or _is_silent(upstream)
            ):
                return upstream
            upstream.abort()
        return None

    async def connect(self, place: Place) -> Upstream:
        """A new one. Raises `OSError`, of which `TimeoutError` is one."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.limits.connect_timeout_s):
                _, upstream = await loop.create_connection(
                    lambda: Upstream(loop, place.key, self, self._heads),
                    place.host,
                    place.port,
                    ssl=place.tls,
                )
        except (socket.gaierror, UnicodeError) as error:
            raise OSError(errno.EHOSTUNREACH, "the host's name is not known") from error
        return upstream

    def put(self, upstream: Upstream) -> None:
        """Its exchange is over; keep it for the next."""
        waiting = self._idle.get(upstream.key)
        if waiting is None:
            waiting = self._idle[upstream.key] = []
        if len(waiting) >= self.limits.max_upstream_idle:
            upstream.abort()
            return
        upstream.rest(self._idle_s)
        waiting.append(upstream)

    def dropped(self, upstream: Upstream) -> None:
        """It is closed, or about to be."""
        waiting = self._idle.get(upstream.key)
        if waiting and upstream in waiting:
            waiting.remove(upstream)
            if not waiting:
                del self._idle[upstream.key]

    def close(self) -> None:
        for waiting in list(self._idle.values()):
            for upstream in list(waiting):
                upstream.abort()
        self._idle.clear()


def _is_silent(upstream: Upstream) -> bool:
    """What an idle backend sends is the end: better seen now than after the request was written."""
    poll = select.poll()
    poll.register(upstream.transport.get_extra_info("socket").fileno(), select.POLLIN)
    return not poll.poll(0)
