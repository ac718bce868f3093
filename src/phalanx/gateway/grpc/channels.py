"""Requests to model servers, over connections that are opened when first needed and closed when the
server is gone.

A connection is ready before a request is put on it, so that a request that found none has never
started. One that could not be made is forgotten: the next request tries anew.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

import grpc

from phalanx import __version__
from phalanx.gateway.grpc.client_call import Answer, ClientCall
from phalanx.gateway.grpc.message_reader import Pieces
from phalanx.gateway.grpc.metadata import timeout_field
from phalanx.gateway.grpc.rpc_error import RpcError
from phalanx.gateway.grpc.upstream import Connecting, Upstream
from phalanx.gateway.http2.connection import Role
from phalanx.gateway.http2.header_blocks import written
from phalanx.gateway.http2.limits import Http2Limits
from phalanx.gateway.http2.read_buffer import ReadBuffer
from phalanx.routing.endpoint import Endpoint
from phalanx.wire.robot_inference import INFER

MAX_MESSAGE_BYTES = 100 * 1024 * 1024
CONNECT_TIMEOUT_S = 2.0
KEEPALIVE_S = 10.0


class Channels:
    """Belongs to the gateway's event loop. `live` names the endpoints whose connections are kept.

    `backend_key` is what model servers ask for as a bearer token, where they do. A connection with a
    call on it at which nothing at all comes for `keepalive_s`, not even the answer to a ping, has
    lost its server, and ends its calls with UNAVAILABLE.
    """

    def __init__(
        self,
        live: Callable[[], frozenset[Endpoint]],
        *,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        keepalive_s: float = KEEPALIVE_S,
        backend_key: str | None = None,
    ) -> None:
        self._live = live
        self._max_message_bytes = max_message_bytes
        # Idle connections are not pinged: servers that know nothing of it would close them.
        half_s = keepalive_s / 2
        role = Role(client=True, quiet_s=half_s, answer_s=half_s, idle_pings=False)
        # Each request has a deadline; until then its server may take it as slowly as it likes.
        limits = Http2Limits(greeting_timeout_s=connect_timeout_s, stall_timeout_s=math.inf)
        self._how = Connecting(role, limits, connect_timeout_s, ReadBuffer())
        self._upstreams: dict[Endpoint, Upstream] = {}
        self._fields = [
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", INFER.encode()),
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
            (b"user-agent", f"phalanx/{__version__}".encode()),
        ]
        if backend_key is not None:
            self._fields.append((b"authorization", f"Bearer {backend_key}".encode()))

    async def infer(self, endpoint: Endpoint, payload: Pieces, end_s: float) -> Answer:
        """The server's answer and its trailing metadata; `end_s` is by the event loop's clock.

        Raises `NotConnectedError`, `TimeoutError` where there was no connection before `end_s`, and
        `RpcError` for a call that was sent, or is too large to be.
        """
        num_bytes = sum(map(len, payload))
        if num_bytes > self._max_message_bytes:
            raise RpcError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"the message has {num_bytes} bytes; at most {self._max_message_bytes} are allowed",
            )
        upstream = self._upstream(endpoint)
        connection = upstream.ready()
        if connection is None:
            async with asyncio.timeout_at(end_s):
                connection = await upstream.connected()
        call = ClientCall(self._max_message_bytes)
        loop = asyncio.get_running_loop()
        left_s = end_s - loop.time()
        timeout = written(((b"grpc-timeout", timeout_field(left_s)),))
        call.begin(connection, upstream.head + timeout, payload, num_bytes)
        timer = loop.call_at(end_s, call.late)
        try:
            return await call.answer
        except asyncio.CancelledError:
            call.cancel()
            raise
        finally:
            timer.cancel()

    async def close(self) -> None:
        """Close all; calls that still run end."""
        upstreams, self._upstreams = self._upstreams, {}
        for upstream in upstreams.values():
            await upstream.close()

    def _upstream(self, endpoint: Endpoint) -> Upstream:
        upstream = self._upstreams.get(endpoint)
        if upstream is None:
            # Servers come and go; their connections would stay for as long as the gateway runs.
            for gone in self._upstreams.keys() - self._live():
                self._upstreams.pop(gone).leave()
            authority = (b":authority", endpoint.authority.encode())
            fields = [*self._fields[:3], authority, *self._fields[3:]]
            upstream = self._upstreams[endpoint] = Upstream(endpoint, written(fields), self._how)
        return upstream
