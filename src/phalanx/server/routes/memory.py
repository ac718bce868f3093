"""Release and resume memory, as SGLang has them, and safe to repeat."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from phalanx.server.answering import Answering
from phalanx.server.dialects import SGLANG
from phalanx.server.operations.memory import MemoryOperations
from phalanx.wire.sglang.memory import DONE, parse_memory


class MemoryRoutes:
    """200 is answered when the memory is free, or is there again."""

    def __init__(self, memory: MemoryOperations, answering: Answering) -> None:
        self._memory = memory
        self._answering = answering

    async def release(self, request: Request) -> Response:
        return await self._answering.control(request, SGLANG, self._release)

    async def resume(self, request: Request) -> Response:
        return await self._answering.control(request, SGLANG, self._resume)

    async def _release(self, body: bytes) -> Response:
        await self._memory.release(parse_memory(body))
        return Response(DONE, media_type="application/json")

    async def _resume(self, body: bytes) -> Response:
        await self._memory.resume(parse_memory(body))
        return Response(DONE, media_type="application/json")
