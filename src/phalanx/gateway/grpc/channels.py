"""Connections to model servers, one each, opened when first needed and closed when the server is
gone.

A connection is ready before a request is put on it, so that a request that found none has never
started. One that could not be made is given up: the next request tries anew and waits for nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
import grpc.aio

from phalanx.routing.endpoint import Endpoint
from phalanx.wire.robot_inference import INFER

Metadata = tuple[tuple[str, str | bytes], ...]
Method = grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]
State = grpc.ChannelConnectivity

MAX_MESSAGE_BYTES = 100 * 1024 * 1024
CONNECT_TIMEOUT_S = 2.0
KEEPALIVE_S = 10.0


class NotConnectedError(Exception):
    """There is no connection to the server, so that nothing was sent to it.

    Says why and not where: callers get to read it, and addresses are for operators.
    """


class _Connection:
    """`num_users` wait for it or have calls on it; once `given_up`, the last one closes it."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.infer: Method = channel.unary_unary(INFER)
        self.num_users = 0
        self.given_up = False


class Channels:
    """Belongs to the gateway's event loop. `live` names the endpoints whose channels are kept.

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
        self._connect_timeout_s = connect_timeout_s
        self._connections: dict[Endpoint, _Connection] = {}
        self._metadata: Metadata = (
            () if backend_key is None else (("authorization", f"Bearer {backend_key}"),)
        )
        half_ms = max(1, int(keepalive_s * 500))
        self._options = (
            # A host that lost its power or its network says no goodbye.
            ("grpc.keepalive_time_ms", half_ms),
            ("grpc.keepalive_timeout_ms", half_ms),
            # Newer gRPC waits for the answer to a ping as long as this says instead, else a minute.
            ("grpc.http2.ping_timeout_ms", half_ms),
            ("grpc.http2.max_pings_without_data", 0),
            # Idle connections are not pinged: servers that know nothing of it would close them.
            ("grpc.keepalive_permit_without_calls", 0),
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", max_message_bytes),
            # Shares no connection, and so no waiting after a failure, with other channels.
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_http_proxy", 0),
            ("grpc.enable_retries", 0),
        )

    async def infer(
        self, endpoint: Endpoint, payload: bytes, end_s: float
    ) -> tuple[bytes, Metadata]:
        """The server's answer and its trailing metadata; `end_s` is by the event loop's clock.

        Raises `NotConnectedError`, `TimeoutError` where there was no connection before `end_s`, and
        whatever gRPC raises for a call that was sent.
        """
        connection = await self._connected(endpoint, end_s)
        try:
            timeout_s = end_s - asyncio.get_running_loop().time()
            call = connection.infer(payload, timeout=timeout_s, metadata=self._metadata or None)
            answer = await call
            return answer, tuple(await call.trailing_metadata() or ())
        finally:
            await self._left(connection)

    async def close(self) -> None:
        """Close all; calls that still run are cancelled."""
        connections, self._connections = self._connections, {}
        for connection in connections.values():
            await connection.channel.close()

    async def _connected(self, endpoint: Endpoint, end_s: float) -> _Connection:
        """A ready connection with one user more."""
        known = self._connections.get(endpoint)
        if known is not None and known.channel.get_state(try_to_connect=True) is State.READY:
            known.num_users += 1
            return known
        async with asyncio.timeout_at(end_s):
            connection = await self._connection(endpoint)
            connection.num_users += 1
            try:
                fault = await self._connect(connection.channel)
                if fault:
                    await self._give_up(endpoint, connection)
                    raise NotConnectedError(fault)
            except BaseException:
                await self._left(connection)
                raise
            return connection

    async def _left(self, connection: _Connection) -> None:
        connection.num_users -= 1
        if connection.given_up and not connection.num_users:
            await connection.channel.close()

    async def _connection(self, endpoint: Endpoint) -> _Connection:
        connection = self._connections.get(endpoint)
        if connection is not None and connection.channel.get_state() is State.TRANSIENT_FAILURE:
            await self._give_up(endpoint, connection)
        if endpoint not in self._connections:
            await self._close_unused()
        if endpoint not in self._connections:
            channel = grpc.aio.insecure_channel(endpoint.authority, options=self._options)
            self._connections[endpoint] = _Connection(channel)
        return self._connections[endpoint]

    async def _connect(self, channel: grpc.aio.Channel) -> str:
        """What keeps the channel from being ready, in words; empty where it is."""
        state = channel.get_state(try_to_connect=True)
        if state is State.READY:
            return ""
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                while state in (State.IDLE, State.CONNECTING):
                    await channel.wait_for_state_change(state)
                    state = channel.get_state(try_to_connect=True)
        except TimeoutError:
            return f"it took no connection within {self._connect_timeout_s:g} s"
        return "" if state is State.READY else "it refuses connections"

    async def _give_up(self, endpoint: Endpoint, connection: _Connection) -> None:
        connection.given_up = True
        if self._connections.get(endpoint) is connection:
            del self._connections[endpoint]
        if not connection.num_users:
            await connection.channel.close()

    async def _close_unused(self) -> None:
        """Servers come and go; their channels would stay for as long as the gateway runs."""
        for endpoint in self._connections.keys() - self._live():
            await self._give_up(endpoint, self._connections[endpoint])
