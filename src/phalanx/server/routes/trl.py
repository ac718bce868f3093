"""TRL's own server (`trl vllm-serve`), as its trainers call it; every path ends in a slash."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from phalanx.errors import InvalidRequestError
from phalanx.schema.generate import GenerateOutput, GenerateRequest
from phalanx.server.answering import Answering, Work
from phalanx.server.dialects import SGLANG
from phalanx.server.operations.parts import Operations
from phalanx.server.routes.chat import prompt_ids_of
from phalanx.server.routes.completions import completion_requests
from phalanx.server.text_service import Prepared, TextService, version_header
from phalanx.wire.openai import in_clients_names
from phalanx.wire.vllm import trl

Endpoint = Callable[[Request], Awaitable[Response]]
_NO_COMMUNICATOR = (
    "TRL's communicator runs over NCCL between GPUs, which this server does not join; write the "
    "weights to a directory and use /update_weights_from_disk, or join a torch group with "
    "/init_weights_update_group and use /update_weights_from_distributed"
)


class TrlRoutes:
    """Prompts and scores as TRL asks for them; new weights come by other routes."""

    def __init__(self, service: TextService, operations: Operations, answering: Answering) -> None:
        self._service = service
        self._operations = operations
        self._answering = answering

    def posts(self) -> dict[str, Endpoint]:
        """What takes POST, by path."""
        asked: dict[str, Work] = {
            "/generate/": self._generate,
            "/chat/": self._chat,
            "/get_sequence_logprobs/": self._score,
        }
        works: dict[str, Work] = {
            "/reset_prefix_cache/": self._reset_prefix_cache,
            "/init_communicator/": self._no_communicator,
            "/update_named_param/": self._no_communicator,
            "/batch_update_named_params/": self._no_communicator,
            "/close_communicator/": self._close_communicator,
        }
        return {
            **{path: self._model(work) for path, work in asked.items()},
            **{path: self._control(work) for path, work in works.items()},
        }

    async def health(self, request: Request) -> Response:
        failure = self._service.engine.failure
        if failure is not None:
            return _json({"status": str(failure)}, 503)
        return _json({"status": "ok"})

    async def world_size(self, request: Request) -> Response:
        return _json({"world_size": self._operations.weights.world_size})

    def _model(self, work: Work) -> Endpoint:
        async def answer(request: Request) -> Response:
            return await self._answering.model(request, SGLANG, work)

        return answer

    def _control(self, work: Work) -> Endpoint:
        async def answer(request: Request) -> Response:
            return await self._answering.control(request, SGLANG, work)

        return answer

    async def _generate(self, body: bytes) -> Response:
        wanted = trl.parse_generate(body)
        call = wanted.call()
        with in_clients_names(call.names):
            prepared = await self._service.prepare(completion_requests(call, _fresh("trl")))
        return await self._generated(prepared, wanted)

    async def _chat(self, body: bytes) -> Response:
        wanted = trl.parse_chats(body)
        calls = wanted.calls()
        service = self._service
        prompts = await service.off_loop(
            len(body), lambda: [prompt_ids_of(service, one) for one in calls]
        )
        requests = [
            GenerateRequest(
                input_ids=ids,
                sampling=call.sampling(service.room(len(ids))),
                logprobs=call.logprobs,
            )
            for call, ids in zip(calls, prompts, strict=True)
        ]
        return await self._generated(await self._prepared(requests), wanted)

    async def _score(self, body: bytes) -> Response:
        wanted = trl.parse_score(body)
        outputs = await self._outputs(await self._prepared(wanted.requests()))
        # A row for each of some thousand tokens takes its time.
        encoded = await self._service.off_loop(len(body), lambda: trl.scored(wanted, outputs))
        return Response(encoded, 200, version_header(outputs), "application/json")

    async def _generated(
        self, prepared: list[Prepared], wanted: trl.GenerateBody | trl.ChatBody
    ) -> Response:
        outputs = await self._outputs(prepared)
        encoded = trl.generated([one.prompt_ids for one in prepared], outputs, wanted)
        return Response(encoded, 200, version_header(outputs), "application/json")

    async def _prepared(self, requests: Sequence[GenerateRequest]) -> list[Prepared]:
        rid = _fresh("trl")
        return await self._service.prepare(
            [(f"{rid}-{at}", one) for at, one in enumerate(requests)]
        )

    async def _outputs(self, prepared: Sequence[Prepared]) -> list[GenerateOutput]:
        pending = self._service.submit(prepared)
        try:
            return [await waiting.output() for waiting in pending]
        finally:
            for waiting in pending:
                waiting.close()

    async def _reset_prefix_cache(self, body: bytes) -> Response:
        flushed = await self._operations.generation.flush()
        return _json({"message": f"Request received, resetting prefix cache status: {flushed}"})

    async def _no_communicator(self, body: bytes) -> Response:
        self._operations.weights.check_dynamic()
        raise InvalidRequestError(_NO_COMMUNICATOR)

    async def _close_communicator(self, body: bytes) -> Response:
        return _json({"message": "Request received, closing communicator"})


def _fresh(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
