"""openpi's WebSocket protocol at the gateway: metadata first, then an answer to each observation.

A request that fails is answered by a text, which openpi's client raises as an error; the connection
stays, so that a robot can go on with its next observation.
"""

from __future__ import annotations

import logging

from phalanx.clock import Clock
from phalanx.errors import MalformedRequestError, PhalanxError
from phalanx.gateway.http.message import HttpRequest
from phalanx.gateway.http.request_ids import RequestIds
from phalanx.gateway.http.router import Router
from phalanx.gateway.http.websocket import WebSocket
from phalanx.gateway.inference import PolicyCaller
from phalanx.gateway.workers import Workers
from phalanx.wire.openpi import decode_observation, encode_metadata, encode_result
from phalanx.wire.robot_inference import InferenceAnswer, InferenceCall, encode_request

logger = logging.getLogger(__name__)

PATH = "/"
MODEL_QUERY, MODEL_HEADER = "model", "x-phalanx-model"


class OpenpiAdapter:
    """Clients connect to `ws://GATEWAY/?model=NAME`; without a name they get `default_model`, None
    being the only model there is.
    """

    def __init__(
        self,
        caller: PolicyCaller,
        workers: Workers,
        ids: RequestIds,
        clock: Clock,
        *,
        default_model: str | None = None,
    ) -> None:
        self._caller = caller
        self._workers = workers
        self._ids = ids
        self._clock = clock
        self._default_model = default_model

    def add_to(self, router: Router) -> None:
        router.websocket(PATH, self.serve)

    async def serve(self, request: HttpRequest, socket: WebSocket) -> None:
        """One connection, until the client goes away."""
        model = request.query.get(MODEL_QUERY) or request.headers.get(MODEL_HEADER)
        connection = _Connection(self, socket, model or self._default_model)
        await connection.serve()

    async def answer(self, frame: bytes, model: str | None) -> InferenceAnswer:
        """The policy's answer to one frame."""
        request_id = self._ids.of(None).decode()

        def read() -> tuple[InferenceCall, bytes]:
            call = InferenceCall(request_id, model or "", decode_observation(frame))
            return call, encode_request(call)

        call, payload = await self._workers.run(read, len(frame))
        return await self._caller.answer(call, payload=payload)

    def now_s(self) -> float:
        return self._clock.monotonic_s()


class _Connection:
    def __init__(self, adapter: OpenpiAdapter, socket: WebSocket, model: str | None) -> None:
        self._adapter = adapter
        self._socket = socket
        self._model = model
        self._previous_ms: float | None = None

    async def serve(self) -> None:
        metadata = {} if self._model is None else {"model_name": self._model}
        await self._socket.send(encode_metadata(metadata))
        while (frame := await self._socket.receive()) is not None:
            try:
                message: str | bytes = await self._answered(frame)
            except PhalanxError as error:
                logger.info("an openpi client's request failed: %s", error)
                message = str(error)
            await self._socket.send(message)

    async def _answered(self, frame: str | bytes) -> bytes:
        if isinstance(frame, str):
            raise MalformedRequestError("the frame is a text; send MessagePack as a binary frame")
        started_s = self._adapter.now_s()
        answer = await self._adapter.answer(frame, self._model)
        server_ms = (self._adapter.now_s() - started_s) * 1000.0
        previous_ms, self._previous_ms = self._previous_ms, server_ms
        return encode_result(
            answer.actions,
            infer_ms=answer.inference_time_us / 1000.0,
            server_ms=server_ms,
            previous_ms=previous_ms,
        )
