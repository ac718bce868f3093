"""A proxy in front of an engine in which faults happen; see `phalanx.testing.fault_server`."""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from functools import partial
from typing import Any, Self
from urllib.parse import urlsplit

import msgspec

from phalanx.testing.faults import (
    FLUSH,
    RELEASE,
    RESUME,
    TEXT_PATHS,
    Fault,
    FaultKind,
    FaultList,
    SetFault,
)
from phalanx.testing.raw_http import RawRequest, answer, read_request

MAX_CALLS = 10_000
_ALL_TAGS = ("kv_cache", "weights", "cuda_graph")
_CRASHES = (FaultKind.CRASH, FaultKind.CRASH_WHEN_BUSY, FaultKind.CRASH_UNMATCHED)
_IN_ANSWERS = (FaultKind.SLOW_DRAIN, FaultKind.CUT)
_CHUNK_BYTES = 1 << 16
_HEAD_BYTES = 1 << 20
_TURNS_TO_ACCEPT = 5
"""Turns of the loop from a connection's arrival until it is served."""


class Call(msgspec.Struct, kw_only=True):
    """One request that came. `status` is that of its answer, None where there was none."""

    method: str
    path: str
    status: int | None = None
    fault: FaultKind | None = None


class _LostError(Exception):
    """The connection is closed without an answer, or without the rest of one."""


class _CrashError(Exception):
    """The engine dies of the request."""


class FaultServer:
    """Belongs to one event loop. `on_crash` is called when the engine is to be gone, and kills it
    where that should be so for real.
    """

    def __init__(
        self,
        upstream: str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        on_crash: Callable[[], None] | None = None,
    ) -> None:
        """`upstream` is the engine, http://HOST:PORT; port 0 takes a free one."""
        self.calls: collections.deque[Call] = collections.deque(maxlen=MAX_CALLS)
        self._upstream = _address(upstream)
        self._host = host
        self._port = port
        self._on_crash = on_crash
        self._faults = FaultList()
        self._server: asyncio.Server | None = None
        self._ending: asyncio.Task[None] | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self._arrivals: collections.Counter[str] = collections.Counter()
        self._arrived = asyncio.Condition()
        self._released: set[str] = set()
        self._num_answering = 0
        self._num_draining = 0

    @property
    def url(self) -> str:
        """To be called instead of the engine."""
        return f"http://{self._host}:{self._port}"

    @property
    def has_crashed(self) -> bool:
        return self._server is None

    @property
    def faults(self) -> FaultList:
        return self._faults

    def add(self, *faults: Fault) -> int:
        """Set faults; returns the id of the last one, by which it is lifted."""
        return [self._faults.add(fault) for fault in faults][-1]

    def lift(self, fault_id: int | None = None) -> None:
        """Lift one fault, or all of them; what they hold goes on."""
        self._faults.lift(fault_id)

    async def arrived(self, path: str, count: int = 1) -> None:
        """Wait until that many requests of `path` have come, in all."""
        async with self._arrived:
            await self._arrived.wait_for(lambda: self._arrivals[path] >= count)

    def crash(self) -> None:
        """The engine is gone: connections are lost, and further ones refused."""
        if self._server is None:
            return
        server, self._server = self._server, None
        self._ending = asyncio.create_task(_end(server))
        current = asyncio.current_task()
        for task in self._serving:
            if task is not current:
                task.cancel()
        if self._on_crash is not None:
            self._on_crash()

    async def revive(self, upstream: str | None = None) -> None:
        """It is there again, at the same address, in front of another engine perhaps."""
        if upstream is not None:
            self._upstream = _address(upstream)
        self._released.clear()
        if self._server is None:
            await self._ended()
            self._server = await asyncio.start_server(
                self._serve, self._host, self._port, limit=_HEAD_BYTES
            )
            self._port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        self._on_crash = None
        self.crash()
        await self._ended()
        while self._serving:
            for task in self._serving:
                task.cancel()
            await asyncio.gather(*self._serving, return_exceptions=True)

    async def _ended(self) -> None:
        """Until nothing listens any more where it has crashed."""
        if self._ending is not None:
            await self._ending

    async def __aenter__(self) -> Self:
        await self.revive()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            if self._server is None:
                raise _LostError
            request = await read_request(reader, writer)
            if request is not None:
                call = Call(method=request.method, path=request.path)
                await self._count(call)
                await _while_connected(reader, self._handle(request, call, writer))
            writer.close()
        except _CrashError:
            writer.transport.abort()
            self.crash()
        except (_LostError, asyncio.CancelledError, ConnectionError, asyncio.IncompleteReadError):
            writer.transport.abort()
        except ValueError:
            writer.write(answer(400, {"error": {"message": "this is no HTTP/1.1 request"}}))
            writer.close()
        finally:
            self._serving.discard(task)

    async def _count(self, call: Call) -> None:
        self.calls.append(call)
        async with self._arrived:
            self._arrivals[call.path] += 1
            self._arrived.notify_all()

    async def _handle(self, request: RawRequest, call: Call, writer: asyncio.StreamWriter) -> None:
        due = self._faults.take(request.path, partial(self._happens, request))
        if due is not None:
            await self._go_wrong(due, request, call, writer)
        elif request.path == FLUSH and self._num_draining:
            call.status = 400
            writer.write(answer(400, {"error": {"message": "Cache not flushed: not drained."}}))
        else:
            await self._pass_on(request, call, writer)

    def _happens(self, request: RawRequest, fault: Fault) -> bool:
        if fault.kind is FaultKind.CRASH_WHEN_BUSY:
            return self._num_answering > 0
        if fault.kind is FaultKind.CRASH_UNMATCHED:
            return not self._released.issuperset(_tags(request))
        return fault.kind not in _IN_ANSWERS

    async def _go_wrong(
        self, due: SetFault, request: RawRequest, call: Call, writer: asyncio.StreamWriter
    ) -> None:
        fault = due.fault
        call.fault = fault.kind
        if fault.kind in _CRASHES:
            raise _CrashError
        whole = [part async for part in self._answer(request, call)] if fault.after else None
        match fault.kind:
            case FaultKind.DELAY:
                await asyncio.sleep(fault.delay_s)
            case FaultKind.HANG:
                await due.lifted.wait()
            case FaultKind.STATUS:
                call.status = fault.status
                writer.write(answer(fault.status, {"error": {"message": "a fault was set"}}))
                return
            case _:
                call.status = None
                raise _LostError
        if whole is None:
            await self._pass_on(request, call, writer)
        else:
            writer.write(b"".join(whole))

    async def _pass_on(self, request: RawRequest, call: Call, writer: asyncio.StreamWriter) -> None:
        """The engine's answer as it comes, but for a slow end or a cut."""
        is_text = request.path in TEXT_PATHS
        slow = self._faults.take(request.path, lambda fault: is_text and _is_slow(fault))
        cut = self._faults.take(request.path, lambda fault: fault.kind is FaultKind.CUT)
        found = slow or cut
        if found is not None:
            call.fault = found.fault.kind
        self._num_answering += is_text
        self._num_draining += slow is not None
        try:
            async with contextlib.aclosing(self._answer(request, call)) as answering:
                writer.write(await anext(answering))  # the head
                await _copy(answering, writer, slow, cut)
        finally:
            self._num_answering -= is_text
            self._num_draining -= slow is not None

    async def _answer(self, request: RawRequest, call: Call) -> AsyncGenerator[bytes, None]:
        """The engine's answer: its head, then parts of its body."""
        try:
            reader, writer = await asyncio.open_connection(*self._upstream, limit=_HEAD_BYTES)
        except OSError as error:
            call.status = 502
            yield answer(502, {"error": {"message": f"the engine cannot be reached: {error}"}})
            return
        try:
            writer.write(request.encoded())
            head = await reader.readuntil(b"\r\n\r\n")
            call.status = int(head.split(b" ", 2)[1])
            self._remember(request, call.status)
            yield head
            while part := await reader.read(_CHUNK_BYTES):
                yield part
        finally:
            writer.transport.abort()

    def _remember(self, request: RawRequest, status: int) -> None:
        if status != 200:
            return
        if request.path == RELEASE:
            self._released.update(_tags(request))
        elif request.path == RESUME:
            self._released.difference_update(_tags(request))


async def _copy(
    parts: AsyncIterator[bytes],
    writer: asyncio.StreamWriter,
    slow: SetFault | None,
    cut: SetFault | None,
) -> None:
    held, num_left = b"", None if cut is None else cut.fault.num_bytes
    async for part in parts:
        if num_left is not None and len(part) >= num_left:
            writer.transport.set_write_buffer_limits(0)
            writer.write(part[:num_left])
            await writer.drain()  # until all of it is sent
            raise _LostError
        num_left = None if num_left is None else num_left - len(part)
        # With a slow end the last part is held back, and nobody knows yet which that is.
        writer.write(part if slow is None else held)
        held = part
        await writer.drain()
    if slow is not None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(slow.fault.delay_s or None):
                await slow.lifted.wait()
        writer.write(held)


async def _end(server: asyncio.Server) -> None:
    """Close it once it serves all that it has accepted: asyncio would never close those."""
    for listening in server.sockets:
        asyncio.get_running_loop().remove_reader(listening.fileno())
    for _ in range(_TURNS_TO_ACCEPT):
        await asyncio.sleep(0)
    server.close()


async def _while_connected(reader: asyncio.StreamReader, work: Coroutine[Any, Any, None]) -> None:
    """Do `work`, and give it up when the client leaves."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(reader.read(1))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
    await working


def _is_slow(fault: Fault) -> bool:
    return fault.kind is FaultKind.SLOW_DRAIN


def _tags(request: RawRequest) -> frozenset[str]:
    body = request.json()
    tags = body.get("tags") if isinstance(body, dict) else None
    return frozenset(tags or _ALL_TAGS)


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname or not parts.port:
        raise ValueError(f"upstream={url!r} must be http://HOST:PORT")
    return parts.hostname, parts.port
