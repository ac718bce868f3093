"""Abort, pause, continue and flush, as SGLang has them."""

from __future__ import annotations

import math

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from phalanx.errors import InvalidRequestError
from phalanx.server.answering import Answering
from phalanx.server.dialects import SGLANG
from phalanx.server.operations.generation import GenerationOperations
from phalanx.wire.sglang.control import done_body, parse_abort, parse_pause


class ControlRoutes:
    """Operations on everything that the server runs."""

    def __init__(self, generation: GenerationOperations, answering: Answering) -> None:
        self._generation = generation
        self._answering = answering

    async def abort(self, request: Request) -> Response:
        return await self._answering.control(request, SGLANG, self._abort)

    async def pause(self, request: Request) -> Response:
        return await self._answering.control(request, SGLANG, self._pause)

    async def go_on(self, request: Request) -> Response:
        return await self._answering.control(request, SGLANG, self._continue)

    async def flush(self, request: Request) -> Response:
        wait = request.query_params.get("timeout", "")
        return await self._answering.control(request, SGLANG, lambda _: self._flush(wait))

    async def _abort(self, body: bytes) -> Response:
        wanted = parse_abort(body)
        if wanted.abort_all:
            self._generation.abort("")
        elif wanted.rid:
            self._generation.abort(wanted.rid)
        return Response(b"")

    async def _pause(self, body: bytes) -> Response:
        await self._generation.pause(parse_pause(body).mode)
        return _done("Generation paused successfully.")

    async def _continue(self, body: bytes) -> Response:
        await self._generation.go_on()
        return _done("Generation continued successfully.")

    async def _flush(self, wait: str) -> Response:
        if await self._generation.flush(_seconds(wait)):
            return PlainTextResponse("Cache flushed.\n")
        return PlainTextResponse(
            "Cache not flushed: requests are running, waiting or being handed over.\n", 400
        )


def _done(message: str) -> Response:
    return Response(done_body(message), media_type="application/json")


def _seconds(text: str) -> float:
    try:
        seconds = float(text or 0)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds >= 0):
        raise InvalidRequestError(
            f"timeout={text!r} must be a number of seconds, at least 0", field="timeout"
        )
    return seconds
