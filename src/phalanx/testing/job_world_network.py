"""What carries a job's HTTP requests to its control process, and loses, repeats and delays them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import httpx

from phalanx.testing.job_world_faults import (
    AGAIN_S,
    LATE_S,
    Life,
    ProcessEndedError,
    Script,
    WorldFault,
)

VERY_LATE_S = 200.0
_NOT_DELIVERED = frozenset({WorldFault.LOST, WorldFault.FAILS, WorldFault.DIES})
_ANSWER_LOST = frozenset({WorldFault.UNHEARD, WorldFault.HANGS_DONE})


class Server(Protocol):
    """Whoever serves now."""

    @property
    def life(self) -> Life: ...

    @property
    def transport(self) -> httpx.AsyncBaseTransport: ...


class Network(httpx.AsyncBaseTransport):
    """That of one process, whose `life` it is. `server` says who listens at this moment, None: nobody.

    `end_control` and `end_caller` end those processes. `answered` is told of every answer, also of
    those that get lost.
    """

    def __init__(
        self,
        script: Script,
        life: Life,
        server: Callable[[], Server | None],
        end_control: Callable[[], None],
        end_caller: Callable[[], None],
        answered: Callable[[httpx.Request, httpx.Response], None] = lambda asked, answer: None,
    ) -> None:
        self._script = script
        self._life = life
        self._server = server
        self._end_control = end_control
        self._end_caller = end_caller
        self._answered = answered
        self._deliveries: set[asyncio.Task[httpx.Response]] = set()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self._life.check()
        await request.aread()
        fault = self._script.take(f"http {request.url.path}")
        await asyncio.sleep(5.0 if fault is WorldFault.SLOW else 0.001)
        if fault is WorldFault.HANGS:
            await asyncio.get_running_loop().create_future()
        if fault is WorldFault.LATE:
            self._send(request, LATE_S if request.url.path == "/v1/phases" else VERY_LATE_S)
            raise httpx.ReadError("the connection was lost")
        if fault in _NOT_DELIVERED:
            raise httpx.ReadError("the connection was lost")
        self._end(fault, WorldFault.CONTROL_ENDS, WorldFault.DRIVER_ENDS)
        delivery = self._send(request)
        if fault is WorldFault.TWICE:
            self._send(request, AGAIN_S)
        await asyncio.wait([delivery])
        self._end(fault, WorldFault.CONTROL_ENDS_AFTER, WorldFault.DRIVER_ENDS_AFTER)
        if fault in _ANSWER_LOST or fault is WorldFault.CONTROL_ENDS_AFTER:
            raise httpx.ReadError("the connection was lost")
        return delivery.result()

    def _end(self, fault: WorldFault | None, control: WorldFault, driver: WorldFault) -> None:
        if fault is control:
            self._end_control()
        if fault is driver:
            self._end_caller()
        self._life.check()

    def _send(self, request: httpx.Request, after_s: float = 0.0) -> asyncio.Task[httpx.Response]:
        """What was sent arrives whatever becomes of the sender."""
        delivery = asyncio.create_task(self._deliver(request, after_s))
        self._deliveries.add(delivery)
        delivery.add_done_callback(self._delivered)
        return delivery

    def _delivered(self, delivery: asyncio.Task[httpx.Response]) -> None:
        self._deliveries.discard(delivery)
        if not delivery.cancelled():
            delivery.exception()  # nobody may be left who takes it

    async def _deliver(self, request: httpx.Request, after_s: float) -> httpx.Response:
        if after_s:
            await asyncio.sleep(after_s)
        server = self._server()
        if server is None:
            raise httpx.ConnectError("nobody listens")
        copy = httpx.Request(
            request.method, request.url, headers=request.headers, content=request.content
        )
        serving = asyncio.create_task(self._serve(server, copy))
        serving.add_done_callback(_noted)
        ended: asyncio.Future[httpx.Response | None] = asyncio.ensure_future(server.life.ended)
        await asyncio.wait([serving, ended], return_when=asyncio.FIRST_COMPLETED)
        answer = None if serving.cancelled() or not serving.done() else serving.result()
        if answer is None or not server.life.is_alive:
            raise httpx.ReadError("the connection was lost")
        self._answered(copy, answer)
        return answer

    async def _serve(self, server: Server, request: httpx.Request) -> httpx.Response | None:
        try:
            answer = await server.transport.handle_async_request(request)
        except ProcessEndedError:
            return None
        return httpx.Response(answer.status_code, content=await answer.aread(), request=request)


def _noted(serving: asyncio.Task[httpx.Response | None]) -> None:
    if not serving.cancelled():
        serving.exception()
