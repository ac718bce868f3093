"""The text routes of `sglang_server`: `/generate`, chat, completions, and the health check that
generates a token.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from phalanx.testing.sglang_answers import (
    Answer,
    Asked,
    BadRequestError,
    parse_chat,
    parse_generate,
    render,
    render_chat,
    text_of,
)
from phalanx.testing.sglang_scheduler import Running, SGLangScheduler

T = TypeVar("T")
_END = -1
_DONE = b"data: [DONE]\n\n"


class SGLangText:
    """Answers from the scheduler's tokens. `args` are the server's, by their names there."""

    def __init__(self, scheduler: SGLangScheduler, args: Mapping[str, object]) -> None:
        self._scheduler = scheduler
        self._model = str(args["served_model_name"])
        self._mode = str(args.get("disaggregation_mode") or "null")
        self._incremental = bool(args.get("stream_output"))
        self._health_timeout_s = 20.0

    def routes(self) -> list[Route]:
        return [
            Route("/generate", self._generate, methods=["POST", "PUT"]),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/completions", self._chat, methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/health_generate", self._health_generate),
        ]

    async def _generate(self, request: Request) -> Response:
        try:
            body = await json_object(request)
            asked, is_batch = parse_generate(body, self._scheduler.options.context_length)
            self._check_pair(body)
        except BadRequestError as error:
            return JSONResponse({"error": {"message": str(error)}}, 400)
        pairs = [(one, run) for one in asked for run in self._paired(one.running())]
        if body.get("stream"):
            indexed = is_batch or len(pairs) > 1
            return StreamingResponse(
                self._stream(pairs, indexed=indexed), media_type="text/event-stream"
            )
        await while_connected(request, self._all([run for _, run in pairs]))
        answers = [render(one, run, self._scheduler) for one, run in pairs]
        return JSONResponse(answers if is_batch or len(answers) > 1 else answers[0])

    async def _stream(
        self, pairs: Sequence[tuple[Asked, Running]], *, indexed: bool
    ) -> AsyncIterator[bytes]:
        sent = [0] * len(pairs)
        async for at in self._merged([run for _, run in pairs]):
            asked, run = pairs[at]
            chunk = render(asked, run, self._scheduler, sent[at] if self._incremental else 0)
            sent[at] = len(run.tokens)
            yield _event({**chunk, "index": at} if indexed else chunk)
        yield _DONE

    async def _chat(self, request: Request) -> Response:
        try:
            body = await json_object(request)
            asked = parse_chat(body)
            self._check_pair(body)
        except BadRequestError as error:
            return JSONResponse(_refusal(str(error)), 400)
        (run,) = self._paired(asked.running())
        if body.get("stream"):
            return StreamingResponse(self._chat_stream(asked, run), media_type="text/event-stream")
        await while_connected(request, self._all([run]))
        return JSONResponse(render_chat(asked, run, self._model, delta=None))

    async def _chat_stream(self, asked: Asked, run: Running) -> AsyncIterator[bytes]:
        sent = 0
        async for _ in self._scheduler.run(run):
            delta = text_of(run.tokens[sent:])
            sent = len(run.tokens)
            yield _event(render_chat(asked, run, self._model, delta=delta))
        yield _DONE

    async def _models(self, request: Request) -> Response:
        self._scheduler.check()
        card = {"id": self._model, "object": "model", "created": 0, "owned_by": "sglang"}
        return JSONResponse({"object": "list", "data": [card]})

    async def _health_generate(self, request: Request) -> Response:
        try:
            async with asyncio.timeout(self._health_timeout_s):
                await self._all([Running("HEALTH_CHECK", (0,), 1)])
        except TimeoutError:
            return Response(status_code=503)
        return Response()

    def _check_pair(self, body: Mapping[str, Any]) -> None:
        if self._mode != "null" and not isinstance(body.get("bootstrap_room"), int):
            raise BadRequestError("Disaggregated request received without bootstrap room id.")

    def _paired(self, requests: list[Running]) -> list[Running]:
        """A prefill worker computes the first token only."""
        if self._mode == "prefill":
            for request in requests:
                request.max_new_tokens = min(request.max_new_tokens, 1)
        return requests

    async def _all(self, requests: Sequence[Running]) -> None:
        async for _ in self._merged(requests):
            pass

    async def _merged(self, requests: Sequence[Running]) -> AsyncIterator[int]:
        """Yields the index of each request that has made progress, until all have ended."""
        progress: asyncio.Queue[int] = asyncio.Queue()

        async def follow(at: int, request: Running) -> None:
            async for _ in self._scheduler.run(request):
                progress.put_nowait(at)

        async def follow_all() -> None:
            try:
                await asyncio.gather(*(follow(*one) for one in enumerate(requests)))
            finally:
                progress.put_nowait(_END)

        following = asyncio.create_task(follow_all())
        try:
            while (at := await progress.get()) != _END:
                yield at
            await following
        finally:
            following.cancel()


async def json_object(request: Request) -> dict[str, Any]:
    """The body; raises `BadRequestError` for anything else. An empty one is an empty object."""
    try:
        body = json.loads(await request.body() or b"{}")
    except ValueError as error:
        raise BadRequestError(f"JSON decode error: {error}") from None
    if body is None:
        return {}
    if not isinstance(body, dict):
        raise BadRequestError("Input should be a valid dictionary")
    return body


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns; it is cancelled when the client goes away."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
    return await working


def _event(chunk: Answer) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def _refusal(message: str) -> Answer:
    return {
        "object": "error",
        "message": message,
        "type": "Bad Request",
        "param": None,
        "code": 400,
    }
