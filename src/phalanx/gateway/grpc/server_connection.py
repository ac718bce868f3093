"""A client's connection to a gRPC port: opens a call for each of its streams."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Protocol

from phalanx.gateway.grpc.request_head import RequestHead, read_head
from phalanx.gateway.grpc.server_call import CallLimits, ServerCall, refuse, refuse_method
from phalanx.gateway.grpc.service import Door, Method
from phalanx.gateway.http2.connection import Connection, Role
from phalanx.gateway.http2.header_blocks import Headers
from phalanx.gateway.http2.limits import Http2Limits
from phalanx.gateway.http2.read_buffer import ReadBuffer
from phalanx.gateway.http2.stream import Nobody, Stream, StreamEvents

# Callers that are gone without a word do not keep their places.
_NUM_HEADS = 16
_ROLE = Role(client=False, quiet_s=20.0, answer_s=10.0, idle_pings=True)


class Port(Protocol):
    """Where connections come in."""

    def opened(self, connection: ServerConnection) -> None: ...

    def closed(self, connection: ServerConnection) -> None: ...


class ServerConnection:
    """Owns a `Connection`, `protocol`, and tells its port when that begins and is over."""

    def __init__(
        self,
        methods: Mapping[str, Method],
        door: Door,
        limits: CallLimits,
        http2: Http2Limits,
        port: Port,
        reading: ReadBuffer,
    ) -> None:
        self.peer = ""
        self.limits = limits
        self.protocol = Connection(_ROLE, http2, self, reading)
        self._methods = methods
        self._door = door
        self._port = port
        self._calls: set[ServerCall] = set()
        self._heads: dict[Headers, RequestHead] = {}

    def leave(self) -> None:
        """Take no more calls; close when those that run have ended."""
        self.protocol.leave()

    def cut(self) -> None:
        """End what runs, and close."""
        for call in list(self._calls):
            call.cancel()
        self.protocol.abort()

    def ended(self, call: ServerCall) -> None:
        self._calls.discard(call)

    # What the connection calls.

    def made(self, transport: asyncio.Transport) -> None:
        self.peer = _peer_of(transport)
        self._port.opened(self)

    def ready(self) -> None: ...

    def request(self, stream: Stream, headers: Headers) -> StreamEvents:
        head = self._head(headers)
        method = self._methods.get(head.path)
        if head.refusal is not None:
            refuse(stream, head.refusal)
        elif method is None:
            refuse_method(stream, head.path)
        else:
            call = ServerCall(stream, head, method, self._door.visit(method, self.peer), self)
            self._calls.add(call)
            call.begin()
            return call
        return Nobody()

    def leaving(self) -> None: ...

    def _head(self, headers: Headers) -> RequestHead:
        """Read, or remembered: most calls of a client begin alike."""
        head = self._heads.get(headers)
        if head is None:
            head = read_head(headers)
            if len(self._heads) >= _NUM_HEADS:
                self._heads.pop(next(iter(self._heads)))
            self._heads[headers] = head
        return head

    def lost(self, words: str) -> None:
        self._port.closed(self)


def _peer_of(transport: asyncio.Transport) -> str:
    """As gRPC writes it."""
    address = transport.get_extra_info("peername")
    if not address:
        return "unknown"
    host, port = address[:2]
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
