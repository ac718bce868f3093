"""A gRPC port with a service that says again what it hears, and one client of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from phalanx.gateway.grpc.front import GrpcFront, GrpcLimits
from phalanx.gateway.grpc.service import Context, Service
from phalanx.gateway.http2.frames import settings
from phalanx.gateway.http2.limits import Http2Limits
from phalanx.testing import ManualClock
from tests.gateway.http2.peer import FIELDS, Peer
from tests.gateway.policy_servers import HOST


def calling(name: str, *more: tuple[bytes, bytes]) -> tuple[tuple[bytes, bytes], ...]:
    """The fields of a call of the service's method `name`."""
    path = f"/test.Echo/{name}".encode()
    return (*((key, path if key == b":path" else value) for key, value in FIELDS), *more)


@dataclass
class Echo:
    """`held` are the calls of `Hold` that came, `left` those that were cancelled."""

    port: int = 0
    held: int = 0
    left: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    release: asyncio.Event = field(default_factory=asyncio.Event)
    taken: list[int] = field(default_factory=list)
    close: Callable[[float], Awaitable[None]] | None = None

    async def until(self, *, held: int = 0, left: int = 0, taken: int = 0) -> None:
        while self.held < held or self.left < left or len(self.taken) < taken:
            self.changed.clear()
            await self.changed.wait()

    def service(self) -> Service:
        return Service(
            "test.Echo",
            unary={"Say": self._say, "Hold": self._hold, "Fail": self._fail, "Quit": self._quit},
            collecting={"Sizes": self._sizes, "Slow": self._slow},
            stream={"Talk": self._talk, "Long": self._long},
        )

    async def _say(self, data: bytes, context: Context) -> bytes:
        return data

    async def _hold(self, data: bytes, context: Context) -> bytes:
        self.held += 1
        self.changed.set()
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.left += 1
            self.changed.set()
            raise
        return data

    async def _fail(self, data: bytes, context: Context) -> bytes:
        raise RuntimeError("a defect")

    async def _quit(self, data: bytes, context: Context) -> bytes:
        raise asyncio.CancelledError

    async def _sizes(self, messages: AsyncIterator[bytes], context: Context) -> bytes:
        return b",".join([str(len(each)).encode() async for each in messages])

    async def _slow(self, messages: AsyncIterator[bytes], context: Context) -> bytes:
        """Takes a message, and the next ones when it is released."""
        async for message in messages:
            self.taken.append(len(message))
            self.changed.set()
            await self.release.wait()
        return b""

    async def _talk(self, messages: AsyncIterator[bytes], context: Context) -> None:
        async for message in messages:
            await context.write(message)

    async def _long(self, messages: AsyncIterator[bytes], context: Context) -> None:
        """Writes without end, as far as somebody reads."""
        while True:
            await context.write(bytes(100_000))
            self.taken.append(100_000)
            self.changed.set()


@asynccontextmanager
async def echo(
    *,
    max_message_bytes: int = 1 << 24,
    max_calls: int = 1024,
    body_timeout_s: float = 60.0,
    **http2: object,
) -> AsyncIterator[Echo]:
    """The service on a port, within limits."""
    served = Echo()
    limits = GrpcLimits(
        max_message_bytes,
        max_calls,
        body_timeout_s,
        Http2Limits(**http2),  # type: ignore[arg-type]
    )
    front = GrpcFront(HOST, 0, limits=limits, clock=ManualClock())
    front.add(served.service())
    served.port = await front.start()
    served.close = front.close
    try:
        yield served
    finally:
        await front.close()


@asynccontextmanager
async def client(served: Echo, hello: bytes = settings({})) -> AsyncIterator[Peer]:
    """One that has said hello."""
    peer = await Peer.client(served.port, hello)
    try:
        yield peer
    finally:
        await peer.close()
