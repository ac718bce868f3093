"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import Response

from phalanx.schema.generate import GenerateRequest
from phalanx.server.answer_header import answer_header
from phalanx.server.answering import Answering
from phalanx.server.dialects import OPENAI
from phalanx.server.event_stream import EventStream
from phalanx.server.served_models import ServedModels
from phalanx.server.text_service import Prepared, TextService, version_header
from phalanx.server.text_stream import TextStream
from phalanx.wire.openai import (
    ChatCall,
    ChatRenderer,
    PromptAnswer,
    in_clients_names,
    parse_chat,
)
from phalanx.wire.sse import DONE


class ChatRoute:
    """One conversation a request."""

    def __init__(self, service: TextService, models: ServedModels, answering: Answering) -> None:
        self._service = service
        self._models = models
        self._answering = answering

    async def __call__(self, request: Request) -> Response:
        return await self._answering.model(
            request, OPENAI, lambda body: self._complete(body, request.headers)
        )

    async def _complete(self, body: bytes, headers: Mapping[str, str]) -> Response:
        call = parse_chat(body)
        self._models.check(call.body.model)
        header = answer_header(call, headers, self._service, self._models, id_begins="chatcmpl")
        ids = await self._service.off_loop(len(body), lambda: prompt_ids_of(self._service, call))
        request = GenerateRequest(
            input_ids=ids,
            sampling=call.sampling(self._service.room(len(ids))),
            logprobs=call.logprobs,
            priority=call.body.priority or 0,
            detokenize=True,
        )
        with in_clients_names(call.names):
            prepared = await self._service.prepare([(header.id, request)], call.bootstraps)
        renderer = ChatRenderer(header)
        if call.stream:
            return await self._stream(prepared, renderer)
        return await self._whole(prepared, renderer)

    async def _whole(self, prepared: list[Prepared], renderer: ChatRenderer) -> Response:
        (waiting,) = self._service.submit(prepared)
        try:
            output = await waiting.output()
        finally:
            waiting.close()
        answer = PromptAnswer(
            prompt_ids=prepared[0].prompt_ids, output=output, elapsed_s=waiting.elapsed_s
        )
        headers = version_header([output])
        return Response(renderer.whole(answer), 200, headers, "application/json")

    async def _stream(self, prepared: list[Prepared], renderer: ChatRenderer) -> Response:
        (stream,) = await self._service.stream(prepared)
        events = _events(stream, renderer)
        return EventStream(
            await anext(events),
            events,
            render_error=OPENAI.stream_error,
            write_timeout_s=self._service.stall_timeout_s,
            headers=self._service.version_header,
        )


def prompt_ids_of(service: TextService, call: ChatCall) -> tuple[int, ...]:
    """The conversation as the model's own template writes it."""
    prompt = service.tokenizer.render_chat(
        call.messages,
        add_generation_prompt=call.add_generation_prompt,
        continue_final_message=call.continue_final_message,
        tools=call.body.tools,
        variables=call.variables,
    )
    service.checked_length(prompt)
    return tuple(service.tokenizer.encode_chat(prompt))


async def _events(stream: TextStream, renderer: ChatRenderer) -> AsyncGenerator[bytes]:
    async with aclosing(stream.parts()) as parts:
        async for part in parts:
            yield renderer.chunk(part.delta)
            if part.output is not None:
                yield renderer.closing([part.output])
    yield DONE
