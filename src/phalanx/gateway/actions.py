"""`POST /v1/actions/generations` at the gateway: a batch of observations in, their actions out."""

from __future__ import annotations

from grpc import StatusCode

from phalanx.errors import (
    BodyTooLargeError,
    EngineUnavailableError,
    InvalidInputError,
    MalformedRequestError,
    NoServerError,
    PhalanxError,
    UnknownModelError,
)
from phalanx.gateway.http.message import JSON, HttpRequest, HttpResponse
from phalanx.gateway.http.router import Router
from phalanx.gateway.inference import PolicyCaller, UpstreamError
from phalanx.gateway.workers import Workers
from phalanx.wire.actions import (
    MEDIA_TYPES,
    Envelope,
    decode_actions_request,
    encode_actions_response,
    error_body,
)
from phalanx.wire.robot_inference import InferenceCall, encode_request

PATH = "/v1/actions/generations"

_UPSTREAM = {
    StatusCode.INVALID_ARGUMENT: (422, "invalid_request"),
    StatusCode.OUT_OF_RANGE: (422, "invalid_request"),
    StatusCode.NOT_FOUND: (404, "model_not_found"),
    StatusCode.RESOURCE_EXHAUSTED: (503, "overloaded"),
    StatusCode.UNAVAILABLE: (503, "unavailable"),
    StatusCode.DEADLINE_EXCEEDED: (504, "deadline_exceeded"),
}
"""A server's own refusals; whatever else it does is a bad gateway's."""
_OWN: tuple[tuple[type[PhalanxError], int, str], ...] = (
    (BodyTooLargeError, 413, "body_too_large"),
    (MalformedRequestError, 400, "malformed_request"),
    (UnknownModelError, 404, "model_not_found"),
    (InvalidInputError, 422, "invalid_request"),
    (EngineUnavailableError, 503, "unavailable"),
    (PhalanxError, 500, "internal_error"),
)
"""More specific classes come before their bases."""


class ActionsAdapter:
    """A request that names no model gets `default_model`, None being the only one there is."""

    def __init__(
        self, caller: PolicyCaller, workers: Workers, *, default_model: str | None = None
    ) -> None:
        self._caller = caller
        self._workers = workers
        self._default_model = default_model

    def add_to(self, router: Router) -> None:
        router.add("POST", PATH, self.handle)

    async def handle(self, request: HttpRequest) -> HttpResponse:
        """The answer, or the refusal as `{"error": {"code", "message"}}`."""
        if request.content_type not in MEDIA_TYPES:
            message = f"content-type {request.content_type!r} is not taken; send {MEDIA_TYPES[0]}"
            return _refusal(415, "unsupported_media_type", message)
        try:
            return await self._answered(request)
        except UpstreamError as error:
            status, code = _UPSTREAM.get(error.code, (502, "bad_gateway"))
            return _refusal(status, code, str(error), retry_after_s=1 if status == 503 else 0)
        except PhalanxError as error:
            status, code = next((s, c) for kind, s, c in _OWN if isinstance(error, kind))
            retry_after_s = error.retry_after_s if isinstance(error, NoServerError) else 0
            return _refusal(status, code, str(error), retry_after_s=retry_after_s)

    async def _answered(self, request: HttpRequest) -> HttpResponse:
        body = request.body

        def read() -> tuple[InferenceCall, Envelope, bytes]:
            asked = decode_actions_request(body)
            model = asked.model_name or self._default_model or ""
            call = InferenceCall(request.request_id, model, asked.observation)
            return call, asked.envelope, encode_request(call)

        call, envelope, payload = await self._workers.run(read, len(body))
        answer = await self._caller.answer(call, payload=payload)
        encoded = encode_actions_response(answer.actions, envelope)
        return HttpResponse.of(200, encoded, MEDIA_TYPES[0])


def _refusal(status: int, code: str, message: str, *, retry_after_s: int = 0) -> HttpResponse:
    headers = {"retry-after": str(retry_after_s)} if retry_after_s else {}
    return HttpResponse.of(status, error_body(code, message), JSON, headers)
