"""The request that a connection is answering, for the statistics and the log."""

from __future__ import annotations

import asyncio
import logging

from phalanx.gateway.http.front import Front
from phalanx.gateway.http.incoming_request import IncomingRequest

logger = logging.getLogger("phalanx.gateway.access")


class RequestAccount:
    """`open`, then `close`, of one request after another; `id` is that of the latest."""

    def __init__(self, front: Front) -> None:
        self.id = b""
        self._front = front
        self._kind = ""
        self._began_s = 0.0

    def open(self, request: IncomingRequest, kind: str) -> None:
        front, known = self._front, request.known
        self.id = front.ids.of(request.given_id if known is None else known.request_id)
        self._kind = kind
        self._began_s = front.clock.monotonic_s()
        front.statistics.num_answering += 1

    def close(self, status: int, request: IncomingRequest, transport: asyncio.Transport) -> None:
        front = self._front
        duration_s = front.clock.monotonic_s() - self._began_s
        front.statistics.record(self._kind, status, duration_s)
        if front.access_log:
            logger.info(
                "method=%s path=%s status=%d duration_ms=%.1f client=%s",
                request.method,
                request.path.encode("unicode_escape").decode(),
                status,
                duration_s * 1000.0,
                peer_of(transport) or "-",
                extra={"rid": self.id.decode()},
            )


def peer_of(transport: asyncio.Transport) -> str:
    """The client's `HOST:PORT`."""
    address = transport.get_extra_info("peername")
    return f"{address[0]}:{address[1]}" if address else ""
