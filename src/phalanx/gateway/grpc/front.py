"""One gRPC port of the gateway, and the services on it."""

from __future__ import annotations

from dataclasses import dataclass

import grpc
import grpc.aio

from phalanx.clock import Clock, SystemClock
from phalanx.errors import ConfigurationError
from phalanx.gateway.grpc.channels import MAX_MESSAGE_BYTES
from phalanx.gateway.grpc.service import Door, Service
from phalanx.gateway.http.keys import Keys

MAX_CALLS = 1024
_KEEPALIVE = (
    # Callers that are gone without a word do not keep their places.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    # And may ask as often as they like whether the gateway is there.
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
)


@dataclass(frozen=True)
class Tls:
    """A certificate chain and its key, as PEM."""

    cert: bytes
    key: bytes


@dataclass(frozen=True)
class GrpcLimits:
    """A larger message is refused, as is a call beyond `max_calls` that run at once; registration
    and health have as many places of their own.
    """

    max_message_bytes: int = MAX_MESSAGE_BYTES
    max_calls: int = MAX_CALLS


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
        limits = limits or GrpcLimits()
        self._host, self._asked_port = host, port
        self._tls = tls
        self._door = Door(
            keys or Keys(),
            clock or SystemClock(),
            max_calls=limits.max_calls,
            access_log=access_log,
        )
        self._server = grpc.aio.server(
            options=(
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", limits.max_message_bytes),
                ("grpc.max_send_message_length", limits.max_message_bytes),
                *_KEEPALIVE,
            )
        )

    def add(self, service: Service) -> None:
        """Serve it to those callers that `keys` let in."""
        self._server.add_generic_rpc_handlers((service.handler(self._door),))

    async def start(self) -> int:
        """Listen, and return the port. Raises `ConfigurationError` where that cannot be done."""
        port = self._bind()
        await self._server.start()
        return port

    async def close(self, drain_s: float = 0.0) -> None:
        """Take no more calls, let those that run end for `drain_s` seconds, then cancel them."""
        await self._server.stop(drain_s)

    def _bind(self) -> int:
        host = f"[{self._host}]" if ":" in self._host else self._host
        address = f"{host}:{self._asked_port}"
        try:
            if self._tls is None:
                return int(self._server.add_insecure_port(address))
            pairs = ((self._tls.key, self._tls.cert),)
            credentials = grpc.ssl_server_credentials(pairs)
            return int(self._server.add_secure_port(address, credentials))
        except RuntimeError as error:
            raise ConfigurationError(
                f"cannot listen on {address} for gRPC: it is in use, or not an address of this "
                "machine, or its certificate cannot be read; choose another"
            ) from error
