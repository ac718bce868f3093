"""`POST /generate`, SGLang's native route."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from phalanx.schema.generate import GenerateOutput
from phalanx.server.answering import Answering
from phalanx.server.dialects import SGLANG
from phalanx.server.event_stream import EventStream
from phalanx.server.live import LiveRequests
from phalanx.server.merge import merged
from phalanx.server.served_models import ServedModels
from phalanx.server.text_service import Prepared, TextService, version_header
from phalanx.server.text_stream import TextStream
from phalanx.wire import sglang
from phalanx.wire.sse import DONE


class GenerateRoute:
    """`incremental`: stream chunks hold what is new instead of everything so far."""

    def __init__(
        self,
        service: TextService,
        models: ServedModels,
        live: LiveRequests,
        answering: Answering,
        *,
        incremental: bool,
    ) -> None:
        self._service = service
        self._models = models
        self._live = live
        self._answering = answering
        self._incremental = incremental

    async def __call__(self, request: Request) -> Response:
        return await self._answering.model(request, SGLANG, self._generate)

    async def _generate(self, body: bytes) -> Response:
        call = sglang.parse_generate(body)
        self._models.check(call.model)
        prepared = await self._service.prepare(
            [(one.rid or uuid.uuid4().hex, one.request) for one in call.prompts],
            [one.bootstrap for one in call.prompts],
        )
        if call.stream:
            return await self._stream(call, prepared)
        return await self._whole(call, prepared)

    async def _whole(self, call: sglang.GenerateCall, prepared: list[Prepared]) -> Response:
        answers: list[sglang.Generation] = []
        outputs: list[GenerateOutput] = []
        renderings = [self._rendering(call, one) for one in prepared]
        pending = self._service.submit(prepared)
        try:
            self._name_completions(renderings)
            for rendering, waiting in zip(renderings, pending, strict=True):
                output = await waiting.output()
                outputs.append(output)
                answers += sglang.render_output(output, rendering, waiting.elapsed_s)
        finally:
            for waiting in pending:
                waiting.close()
        single = not call.batch and len(answers) == 1
        encoded = msgspec.json.encode(answers[0] if single else answers)
        return Response(encoded, 200, version_header(outputs), "application/json")

    async def _stream(self, call: sglang.GenerateCall, prepared: list[Prepared]) -> Response:
        many = call.batch or prepared[0].request.sampling.n > 1
        renderings = [self._rendering(call, one) for one in prepared]
        renderers: list[sglang.StreamRenderer] = []
        first_index = 0
        for rendering in renderings:
            renderers.append(
                sglang.StreamRenderer(
                    rendering,
                    incremental=self._incremental,
                    first_index=first_index if many else None,
                )
            )
            first_index += rendering.num_completions
        events = _events(await self._service.stream(prepared), renderers)
        self._name_completions(renderings)
        return EventStream(
            await anext(events),
            events,
            render_error=SGLANG.stream_error,
            write_timeout_s=self._service.stall_timeout_s,
            headers=self._service.version_header,
        )

    def _name_completions(self, renderings: list[sglang.Rendering]) -> None:
        for one in renderings:
            ids = [one.completion_id(index) for index in range(one.num_completions)]
            self._live.name_completions(one.rid, ids)

    def _rendering(self, call: sglang.GenerateCall, one: Prepared) -> sglang.Rendering:
        options = one.request.logprobs
        return sglang.Rendering(
            rid=one.rid,
            prompt_ids=one.prompt_ids,
            num_completions=one.request.sampling.n,
            logprobs=options is not None,
            top=options is not None and options.top_k > 0,
            selected=options is not None and options.selects,
            token_text=self._service.tokenizer.token_text if call.return_text_in_logprobs else None,
            prompt_token_ids=call.return_prompt_token_ids,
        )


async def _events(
    streams: list[TextStream], renderers: list[sglang.StreamRenderer]
) -> AsyncGenerator[bytes]:
    async with aclosing(merged([one.parts() for one in streams])) as parts:
        async for at, part in parts:
            yield renderers[at].chunk(part.delta, part.output, streams[at].elapsed_s)
    yield DONE
