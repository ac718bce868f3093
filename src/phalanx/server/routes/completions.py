"""`POST /v1/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import Response

from phalanx.schema.generate import GenerateOutput, GenerateRequest
from phalanx.server.answer_header import answer_header
from phalanx.server.answering import Answering
from phalanx.server.dialects import OPENAI
from phalanx.server.event_stream import EventStream
from phalanx.server.merge import merged
from phalanx.server.served_models import ServedModels
from phalanx.server.text_service import Prepared, TextService, version_header
from phalanx.server.text_stream import TextStream
from phalanx.wire.openai import (
    CompletionCall,
    CompletionRenderer,
    CompletionShows,
    PromptAnswer,
    in_clients_names,
    parse_completion,
)
from phalanx.wire.sse import DONE


class CompletionRoute:
    """One or several prompts a request."""

    def __init__(self, service: TextService, models: ServedModels, answering: Answering) -> None:
        self._service = service
        self._models = models
        self._answering = answering

    async def __call__(self, request: Request) -> Response:
        return await self._answering.model(
            request, OPENAI, lambda body: self._complete(body, request.headers)
        )

    async def _complete(self, body: bytes, headers: Mapping[str, str]) -> Response:
        call = parse_completion(body)
        self._models.check(call.body.model)
        header = answer_header(call, headers, self._service, self._models, id_begins="cmpl")
        with in_clients_names(call.names):
            prepared = await self._service.prepare(
                completion_requests(call, header.id), call.bootstraps
            )
        renderer = CompletionRenderer(
            header,
            CompletionShows(
                num_top=call.num_top,
                num_prompt_top=call.num_prompt_top,
                echo=call.echo,
                with_own=bool(call.body.return_tokens_as_token_ids),
            ),
            num_completions=call.body.n or 1,
            echoes=self._echoes(call) if call.echo else None,
        )
        if call.stream:
            return await self._stream(prepared, renderer)
        return await self._whole(prepared, renderer)

    def _echoes(self, call: CompletionCall) -> list[str]:
        decode = self._service.tokenizer.decode
        return [one if isinstance(one, str) else decode(one) for one in call.prompts]

    async def _whole(self, prepared: list[Prepared], renderer: CompletionRenderer) -> Response:
        answers: list[PromptAnswer] = []
        pending = self._service.submit(prepared)
        try:
            for one, waiting in zip(prepared, pending, strict=True):
                output = await waiting.output()
                answers.append(
                    PromptAnswer(
                        prompt_ids=one.prompt_ids, output=output, elapsed_s=waiting.elapsed_s
                    )
                )
        finally:
            for waiting in pending:
                waiting.close()
        headers = version_header([one.output for one in answers])
        return Response(renderer.whole(answers), 200, headers, "application/json")

    async def _stream(self, prepared: list[Prepared], renderer: CompletionRenderer) -> Response:
        events = _events(await self._service.stream(prepared), renderer)
        return EventStream(
            await anext(events),
            events,
            render_error=OPENAI.stream_error,
            write_timeout_s=self._service.stall_timeout_s,
            headers=self._service.version_header,
        )


def completion_requests(call: CompletionCall, id: str) -> list[tuple[str, GenerateRequest]]:
    sampling = call.sampling()
    many = len(call.prompts) > 1
    return [
        (
            f"{id}-{at}" if many else id,
            GenerateRequest(
                prompt=prompt if isinstance(prompt, str) else None,
                input_ids=None if isinstance(prompt, str) else prompt,
                sampling=sampling,
                logprobs=call.logprobs,
                priority=call.body.priority or 0,
            ),
        )
        for at, prompt in enumerate(call.prompts)
    ]


async def _events(streams: list[TextStream], renderer: CompletionRenderer) -> AsyncGenerator[bytes]:
    outputs: list[GenerateOutput] = []
    async with aclosing(merged([one.parts() for one in streams])) as parts:
        async for at, part in parts:
            yield renderer.chunk(at, part.delta)
            if part.output is not None:
                outputs.append(part.output)
    yield renderer.closing(outputs) + DONE
