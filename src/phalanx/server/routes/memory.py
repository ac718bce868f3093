"""Release and resume memory, as SGLang has them, and safe to repeat."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from phalanx.server.answering import Answering, Work
from phalanx.server.dialects import SGLANG
from phalanx.server.operations.call_order import CallOrder
from phalanx.server.operations.memory import MemoryOperations
from phalanx.wire.call_order import HEADER
from phalanx.wire.sglang.memory import DONE, parse_memory


class MemoryRoutes:
    """200 is answered when the memory is free, or is there again."""

    def __init__(self, memory: MemoryOperations, answering: Answering) -> None:
        self._memory = memory
        self._answering = answering
        self._order = CallOrder()

    async def release(self, request: Request) -> Response:
        return await self._answering.control(
            request, SGLANG, self._in_order(request, self._release)
        )

    async def resume(self, request: Request) -> Response:
        return await self._answering.control(request, SGLANG, self._in_order(request, self._resume))

    def _in_order(self, request: Request, work: Work) -> Work:
        async def ordered(body: bytes) -> Response:
            host = None if request.client is None else request.client.host
            self._order.check(request.headers.get(HEADER), host)
            return await work(body)

        return ordered

    async def _release(self, body: bytes) -> Response:
        await self._memory.release(parse_memory(body))
        return Response(DONE, media_type="application/json")

    async def _resume(self, body: bytes) -> Response:
        await self._memory.resume(parse_memory(body))
        return Response(DONE, media_type="application/json")
