"""The robot protocols of a policy server's HTTP port: actions, openpi's socket, its health path."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route, WebSocketRoute

from phalanx.schema.observation import Actions, Observation
from phalanx.schema.server_config import ServerConfig
from phalanx.server.answering import Answering
from phalanx.server.dialects import ACTIONS, Refusals
from phalanx.server.policy.openpi_socket import OpenpiSocket
from phalanx.server.policy.service import Encode, PolicyService, Times
from phalanx.wire.actions import (
    MEDIA_TYPES,
    Envelope,
    decode_actions_request,
    encode_actions_response,
)

ACTIONS_PATH = "/v1/actions/generations"


def policy_routes(service: PolicyService, config: ServerConfig) -> list[BaseRoute]:
    """What a policy adds to the routes that every plugin has."""
    refusals = Refusals(config.retry_after_s)
    answering = Answering(
        config.max_message_bytes, refusals, service.metrics, key="max_message_bytes"
    )
    actions = ActionsRoute(service, answering, refusals)
    socket = OpenpiSocket(service)
    return [
        Route(ACTIONS_PATH, actions.__call__, methods=["POST"]),
        Route("/healthz", partial(_health, service)),
        WebSocketRoute("/", socket.__call__),
    ]


class ActionsRoute:
    """`POST /v1/actions/generations`: MessagePack in both envelopes, answered in the same one."""

    def __init__(self, service: PolicyService, answering: Answering, refusals: Refusals) -> None:
        self._service = service
        self._answering = answering
        self._refusals = refusals

    async def __call__(self, request: Request) -> Response:
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type not in MEDIA_TYPES:
            message = f"content-type {media_type!r} is not taken; send {MEDIA_TYPES[0]}"
            return self._refusals.turned_away(ACTIONS_PATH, message, 415, "unsupported_media_type")
        return await self._answering.control(request, ACTIONS, self._actions)

    async def _actions(self, body: bytes) -> Response:
        answer = await self._service.answer(partial(self._read, body))
        return Response(answer, media_type=MEDIA_TYPES[0])

    def _read(self, body: bytes) -> tuple[Observation, Encode[bytes]]:
        call = decode_actions_request(body)
        self._service.check_model(call.model_name)
        return call.observation, partial(_encode, call.envelope)


def _encode(envelope: Envelope, actions: Actions, times: Times) -> bytes:
    return encode_actions_response(actions, envelope)


async def _health(service: PolicyService, request: Request) -> Response:
    """200 while requests are taken."""
    failure = service.failure
    if failure is not None:
        return PlainTextResponse(f"{failure}\n", 503)
    return PlainTextResponse("OK\n")
