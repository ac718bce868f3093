"""One gRPC port of the gateway, and the services on it."""

from __future__ import annotations

import asyncio
import socket
import ssl
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from phalanx.clock import Clock, SystemClock
from phalanx.errors import ConfigurationError
from phalanx.gateway.grpc.channels import MAX_MESSAGE_BYTES
from phalanx.gateway.grpc.server_call import CallLimits
from phalanx.gateway.grpc.server_connection import ServerConnection
from phalanx.gateway.grpc.service import Door, Method, Service
from phalanx.gateway.http.keys import Keys
from phalanx.gateway.http2.limits import Http2Limits
from phalanx.gateway.http2.read_buffer import ReadBuffer

MAX_CALLS = 1024
_BACKLOG = 1024


@dataclass(frozen=True)
class Tls:
    """A certificate chain and its key, as PEM."""

    cert: bytes
    key: bytes


@dataclass(frozen=True)
class GrpcLimits:
    """A larger message is refused, as is a call beyond `max_calls` that run at once; registration
    and health have as many places of their own. The pieces of a call's only message come at most
    `body_timeout_s` apart. `http2` is for each connection.
    """

    max_message_bytes: int = MAX_MESSAGE_BYTES
    max_calls: int = MAX_CALLS
    body_timeout_s: float = 60.0
    http2: Http2Limits = field(default_factory=Http2Limits)


class GrpcFront:
    """`add` all services, then `start`; `close` lets running calls end first."""

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        keys: Keys | None = None,
        limits: GrpcLimits | None = None,
        tls: Tls | None = None,
        access_log: bool = False,
        clock: Clock | None = None,
    ) -> None:
        """Port 0 takes a free one. `access_log` writes a line for each call."""
        self._limits = limits or GrpcLimits()
        self._host, self._asked_port = host, port
        self._tls = tls
        self._door = Door(
            keys or Keys(),
            clock or SystemClock(),
            max_calls=self._limits.max_calls,
            access_log=access_log,
        )
        self._reading = ReadBuffer()
        self._methods: dict[str, Method] = {}
        self._connections: set[ServerConnection] = set()
        self._emptied = asyncio.Event()
        self._listening: asyncio.Server | None = None
        self._closing = False

    def add(self, service: Service) -> None:
        """Serve it to those callers that `keys` let in."""
        self._methods |= {method.path: method for method in service.methods()}

    async def start(self) -> int:
        """Listen, and return the port. Raises `ConfigurationError` where that cannot be done."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        tls = None if self._tls is None else _tls_context(self._tls)
        try:
            listening = await self._listen(tls)
        except OSError as error:
            raise ConfigurationError(
                f"cannot listen on {host}:{self._asked_port} for gRPC: it is in use, or not an "
                f"address of this machine ({error.strerror or error}); choose another"
            ) from error
        self._listening = listening
        return int(listening.sockets[0].getsockname()[1])

    async def close(self, drain_s: float = 0.0) -> None:
        """Take no more calls, let those that run end for `drain_s` seconds, then cancel them."""
        self._closing = True
        if self._listening is not None:
            self._listening.close()
        for connection in list(self._connections):
            connection.leave()
        try:
            async with asyncio.timeout(drain_s):
                while self._connections:
                    self._emptied.clear()
                    await self._emptied.wait()
        except TimeoutError:
            for connection in list(self._connections):
                connection.cut()

    def opened(self, connection: ServerConnection) -> None:
        """It was made, perhaps when the port had closed already."""
        self._connections.add(connection)
        if self._closing:
            connection.leave()

    def closed(self, connection: ServerConnection) -> None:
        self._connections.discard(connection)
        if not self._connections:
            self._emptied.set()

    async def _listen(self, tls: ssl.SSLContext | None) -> asyncio.Server:
        loop = asyncio.get_running_loop()
        if self._host == "::":
            address = (self._host, self._asked_port)
            both = socket.create_server(
                address, family=socket.AF_INET6, dualstack_ipv6=socket.has_dualstack_ipv6()
            )
            return await loop.create_server(self._connection, sock=both, ssl=tls, backlog=_BACKLOG)
        return await loop.create_server(
            self._connection, self._host, self._asked_port, ssl=tls, backlog=_BACKLOG
        )

    def _connection(self) -> asyncio.BaseProtocol:
        connection = ServerConnection(
            self._methods,
            self._door,
            CallLimits(self._limits.max_message_bytes, self._limits.body_timeout_s),
            self._limits.http2,
            self,
            self._reading,
        )
        return connection.protocol


def _tls_context(tls: Tls) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["h2"])
    with tempfile.TemporaryDirectory(prefix="phalanx-") as folder:
        # Only files can be loaded; nobody else can read these.
        cert, key = Path(folder, "cert.pem"), Path(folder, "key.pem")
        cert.write_bytes(tls.cert)
        key.write_bytes(tls.key)
        try:
            context.load_cert_chain(cert, key)
        except ssl.SSLError as error:
            raise ConfigurationError(
                f"the gRPC port's certificate cannot be read, or its key: {error}; both are PEM"
            ) from error
    return context
