"""The load of the gateway benchmark and the two backends behind each proxy, in one process.

Requests are prepared bytes and responses are counted, not parsed, so that most of the machine is
left to the proxy. All on loopback, and every run ends after a count of requests.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, cast

from background_loop import BackgroundLoop  # type: ignore[import-not-found]
from command_loop import Message, answer_commands  # type: ignore[import-not-found]
from gateway_backend import Backend  # type: ignore[import-not-found]
from gateway_grpc import GrpcBackend, GrpcLoad  # type: ignore[import-not-found]
from gateway_traffic import KINDS, Kind  # type: ignore[import-not-found]

HOST = "127.0.0.1"
TIMEOUT_S = 120.0


class _Connection(asyncio.Protocol):
    """Sends one request after another, as long as `more` says so."""

    def __init__(self, kind: Kind, more: Callable[[], bool], times_s: list[float]) -> None:
        self._kind = kind
        self._more = more
        self._times_s = times_s
        self._began_s = 0.0
        self._scan = kind.scanner()
        self._greeting = kind.greeting
        self._requests = itertools.cycle(kind.requests)
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._greeting:
            self._transport.write(self._greeting)
        else:
            self._next()

    def data_received(self, data: bytes) -> None:
        if self._greeting:
            self._greeting += data
            if b"\r\n\r\n" not in self._greeting[len(self._kind.greeting) :]:
                return
            if b" 101 " not in self._greeting[len(self._kind.greeting) :]:
                self._fail(f"no WebSocket: {self._greeting[-300:]!r}")
                return
            self._greeting = b""
            self._next()
            return
        try:
            whole = self._scan(data)
        except AssertionError as error:
            self._fail(str(error))
            return
        if whole:
            self._times_s.append(time.perf_counter() - self._began_s)
            self._next()

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(f"the connection was lost: {error}")

    def _next(self) -> None:
        if not self._more():
            if not self.done.done():
                self.done.set_result(None)
            self._transport.close()
            return
        self._began_s = time.perf_counter()
        self._transport.write(next(self._requests))

    def _fail(self, why: str) -> None:
        if not self.done.done():
            self.done.set_exception(RuntimeError(f"{self._kind.name}: {why}"))


class Load:
    """Both backends listen as long as this lives."""

    def __init__(self, cores: list[int]) -> None:
        if cores:
            os.sched_setaffinity(0, cores)
        self._loop = BackgroundLoop()
        self.backends = [Backend(), Backend()]
        self.ports = [self._loop.run(backend.listen()) for backend in self.backends]
        self._grpc = [GrpcBackend(), GrpcBackend()]
        self.grpc_ports = [self._loop.run(backend.listen()) for backend in self._grpc]

    def describe(self) -> str:
        return f"uvloop {version('uvloop')}"

    def close(self) -> None:
        for backend in self._grpc:
            self._loop.run(backend.close())
        self._loop.close()

    def run(self, name: str, port: int, count: int, concurrency: int) -> tuple[float, list[float]]:
        """The seconds that `count` requests took together, and each of them."""
        work = (
            GrpcLoad(port).run(count, concurrency)
            if name == "grpc"
            else self._run(KINDS[name], port, count, concurrency)
        )
        times: tuple[float, list[float]] = self._loop.run(work)
        return times

    async def _run(
        self, kind: Kind, port: int, count: int, concurrency: int
    ) -> tuple[float, list[float]]:
        left = count
        times_s: list[float] = []

        def more() -> bool:
            nonlocal left
            left -= 1
            return left >= 0

        loop = asyncio.get_running_loop()
        began_s = time.perf_counter()
        async with asyncio.timeout(TIMEOUT_S):
            made = [
                await loop.create_connection(lambda: _Connection(kind, more, times_s), HOST, port)
                for _ in range(min(concurrency, count))
            ]
            await asyncio.gather(*(connection.done for _, connection in made))
        return time.perf_counter() - began_s, times_s

    def delay(self, delays_s: list[float]) -> None:
        for backend, delay_s in zip(self.backends, delays_s, strict=True):
            backend.delay_s = delay_s
            backend.num_requests = 0


def _load(message: Message) -> Load:
    return Load(message["cores"])


def _ports(load: Load, message: Message) -> Message:
    return {"ports": load.ports, "grpc_ports": load.grpc_ports}


def _run(load: Load, message: Message) -> Message:
    seconds, times_s = load.run(
        message["traffic"], message["port"], message["count"], message["concurrency"]
    )
    return {"seconds": seconds, "times_s": times_s}


def _shares(load: Load, message: Message) -> Message:
    """How many requests each backend gets when they take unequally long."""
    load.delay(message["delays_s"])
    try:
        load.run("json", message["port"], message["count"], message["concurrency"])
        shares: list[Any] = [backend.num_requests for backend in load.backends]
    finally:
        load.delay([0.0, 0.0])
    return {"shares": shares}


if __name__ == "__main__":
    answer_commands(_load, {"ports": _ports, "run": _run, "shares": _shares})
