"""How a server is asked whether it can take requests: `CheckHealth` over gRPC, or a GET."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Protocol

import grpc
import grpc.aio

from phalanx.errors import MalformedRequestError
from phalanx.gateway.http_get import get
from phalanx.routing.registration import Probe
from phalanx.routing.snapshot import Server
from phalanx.wire.robot_inference.control import decode_health_response, encode_health_request
from phalanx.wire.robot_inference.methods import CHECK_HEALTH

Finding = tuple[Probe, str]
"""What a probe showed, and why it failed, in words."""

_CHANNEL = (
    # Shares no connection, and so no waiting after a failure, with other channels to the server.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
)


class HealthCheck(Protocol):
    """One way to ask. The caller bounds the time of `check`, which raises nothing of its own."""

    async def check(self, server: Server) -> Finding: ...

    async def forget(self, server_id: str) -> None:
        """Drop what is kept for a server that is not probed any more."""
        ...

    async def close(self) -> None: ...


class GrpcHealthCheck:
    """Keeps a channel to each server that answers, and opens a new one to one that did not.

    `key` is what servers ask for as a bearer token, where they do.
    """

    def __init__(self, key: str | None = None) -> None:
        self._metadata = None if key is None else (("authorization", f"Bearer {key}"),)
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def check(self, server: Server) -> Finding:
        channel = self._channels.get(server.server_id)
        if channel is None:
            unreachable = await connect_fault(server)
            if unreachable:
                return Probe.UNREACHABLE, unreachable
            channel = grpc.aio.insecure_channel(server.endpoint.authority, options=_CHANNEL)
            self._channels[server.server_id] = channel
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(CHECK_HEALTH)
        try:
            answer = await call(encode_health_request(server.model_name), metadata=self._metadata)
            healthy = decode_health_response(answer)
        except grpc.aio.AioRpcError as error:
            await self.forget(server.server_id)
            return await _grpc_finding(server, error)
        except asyncio.CancelledError:
            # No answer in time: the connection may be to a host that is gone without a word.
            await self.forget(server.server_id)
            raise
        except MalformedRequestError as error:
            return Probe.FAILED, f"CheckHealth answered what is not a health response: {error}"
        if healthy:
            return Probe.HEALTHY, ""
        return Probe.FAILED, "CheckHealth says that it is not healthy"

    async def forget(self, server_id: str) -> None:
        channel = self._channels.pop(server_id, None)
        if channel is not None:
            await channel.close()

    async def close(self) -> None:
        for server_id in list(self._channels):
            await self.forget(server_id)


class HttpHealthCheck:
    """A server is healthy that answers a GET of `path` with success."""

    def __init__(self, path: str = "/health") -> None:
        self._path = path

    async def check(self, server: Server) -> Finding:
        endpoint = server.endpoint
        try:
            status, _ = await get(endpoint.host, endpoint.port, self._path)
        except OSError as error:
            return Probe.UNREACHABLE, connection_words(error)
        except MalformedRequestError as error:
            return Probe.FAILED, f"GET {self._path}: {error}"
        if 200 <= status < 300:
            return Probe.HEALTHY, ""
        return Probe.FAILED, f"GET {self._path} answered {status}"

    async def forget(self, server_id: str) -> None:
        pass

    async def close(self) -> None:
        pass


async def connect_fault(server: Server) -> str:
    """Why no connection can be made to the server, in words; empty where one can."""
    try:
        _, writer = await asyncio.open_connection(server.endpoint.host, server.endpoint.port)
    except OSError as error:
        return connection_words(error)
    writer.transport.abort()
    return ""


def connection_words(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return "its host name is not known"
    if error.errno is not None:
        return os.strerror(error.errno).lower()
    return str(error).lower() or "no connection"


async def _grpc_finding(server: Server, error: grpc.aio.AioRpcError) -> Finding:
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        unreachable = await connect_fault(server)
        if unreachable:
            return Probe.UNREACHABLE, unreachable
    words = f"CheckHealth: {error.code().name}"
    return Probe.FAILED, f"{words}: {error.details()}" if error.details() else words
