"""Connections to model servers, one each, opened when first needed and closed when the server is
gone.

A connection is ready before a request is put on it: a request that found none has never started.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import grpc
import grpc.aio

from phalanx.routing.endpoint import Endpoint
from phalanx.wire.robot_inference import INFER

Metadata = tuple[tuple[str, str | bytes], ...]
Method = grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]
State = grpc.ChannelConnectivity

MAX_MESSAGE_BYTES = 100 * 1024 * 1024
CONNECT_TIMEOUT_S = 2.0
_RECONNECT_MS = 200
"""A server that comes back is asked again that soon."""


class NotConnectedError(Exception):
    """There is no connection to the server, so that nothing was sent to it."""


@dataclass(frozen=True)
class Connection:
    """A server's channel and the method that is called on it."""

    channel: grpc.aio.Channel
    infer: Method


class Channels:
    """Belongs to the gateway's event loop. `live` names the endpoints whose channels are kept.

    `backend_key` is what model servers ask for as a bearer token, where they do.
    """

    def __init__(
        self,
        live: Callable[[], frozenset[Endpoint]],
        *,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        backend_key: str | None = None,
    ) -> None:
        self._live = live
        self._connect_timeout_s = connect_timeout_s
        self._connections: dict[Endpoint, Connection] = {}
        self.metadata: Metadata = (
            () if backend_key is None else (("authorization", f"Bearer {backend_key}"),)
        )
        self._options = (
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", max_message_bytes),
            ("grpc.initial_reconnect_backoff_ms", _RECONNECT_MS),
            ("grpc.max_reconnect_backoff_ms", _RECONNECT_MS),
            ("grpc.min_reconnect_backoff_ms", int(connect_timeout_s * 1000)),
            # A failure to connect belongs to the channel that met it, and ends with it.
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_http_proxy", 0),
            ("grpc.enable_retries", 0),
        )

    async def connected(self, endpoint: Endpoint) -> Connection:
        """The connection, when it is ready. Raises `NotConnectedError` within the connect time-out."""
        connection = self._connections.get(endpoint)
        if connection is None:
            await self._close_dead()
            connection = self._open(endpoint)
        channel = connection.channel
        state = channel.get_state(try_to_connect=True)
        if state is State.READY:
            return connection
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                await _until_ready(channel, state)
        except TimeoutError:
            raise NotConnectedError(
                f"{endpoint} took no connection within {self._connect_timeout_s:g} s"
            ) from None
        except ConnectionError:
            raise NotConnectedError(f"{endpoint} refuses connections") from None
        return connection

    async def close(self) -> None:
        """Close all; calls that still run are cancelled."""
        connections, self._connections = self._connections, {}
        for connection in connections.values():
            await connection.channel.close()

    def _open(self, endpoint: Endpoint) -> Connection:
        channel = grpc.aio.insecure_channel(endpoint.authority, options=self._options)
        connection = Connection(channel, channel.unary_unary(INFER))
        self._connections[endpoint] = connection
        return connection

    async def _close_dead(self) -> None:
        """Servers come and go; their channels would stay for as long as the gateway runs."""
        for endpoint in self._connections.keys() - self._live():
            connection = self._connections.pop(endpoint, None)
            if connection is not None:
                await connection.channel.close()


async def _until_ready(channel: grpc.aio.Channel, state: State) -> None:
    """Raises `ConnectionError` where a try that began after the call fails.

    A channel that failed before waits for its next try, which may succeed.
    """
    failed_before = state is State.TRANSIENT_FAILURE
    while state is not State.READY:
        if state is State.SHUTDOWN or (state is State.TRANSIENT_FAILURE and not failed_before):
            raise ConnectionError
        await channel.wait_for_state_change(state)
        state = channel.get_state(try_to_connect=True)
        failed_before = failed_before and state is State.TRANSIENT_FAILURE
