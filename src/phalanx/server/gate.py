"""What every request passes first: its id, the access log, the key, the server's phase."""

from __future__ import annotations

import hmac
import logging
import uuid

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from phalanx.clock import Clock
from phalanx.log import request_context
from phalanx.schema.server_config import ServerConfig
from phalanx.server.dialects import Refusals
from phalanx.server.lifecycle import Lifecycle, Phase

logger = logging.getLogger("phalanx.server.access")

OPEN_PATHS = frozenset({"/health", "/health/", "/healthz", "/ready"})
"""Answered without a key, in every phase."""
MODEL_PATHS = frozenset(
    {
        "/generate",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/actions/generations",
        "/infer",
        "/health_generate",
        "/generate/",
        "/chat/",
        "/get_sequence_logprobs/",
    }
)
"""Answered by the model: refused unless the server is ready, and waited for by a drain."""
PROBE_PATHS = OPEN_PATHS | {"/ping", "/metrics"}
"""Asked all the time by machines, so that they are logged for debugging only."""
MAX_ID_LENGTH = 128


class Gate:
    """ASGI middleware around all routes."""

    def __init__(
        self, app: ASGIApp, *, config: ServerConfig, lifecycle: Lifecycle, clock: Clock
    ) -> None:
        self._app = app
        self._lifecycle = lifecycle
        self._clock = clock
        self._refusals = Refusals(config.retry_after_s)
        self._log = config.access_log
        key = config.api_key
        # The second is how openpi's client sends it.
        self._authorizations = () if key is None else (f"Bearer {key}", f"Api-Key {key}")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._connect(scope, receive, send)
            return
        headers = dict(scope["headers"])
        request_id = _request_id(headers.get(b"x-request-id"))
        recorder = _Recorder(send, request_id)
        started_s = self._clock.monotonic_s()
        with request_context(request_id):
            try:
                await self._answer(scope, receive, recorder.send, headers)
            finally:
                if self._log:
                    _log(scope, recorder, self._clock.monotonic_s() - started_s)

    async def _connect(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A WebSocket connection; each of its messages is a request of its own."""
        authorization = dict(scope["headers"]).get(b"authorization", b"")
        path: str = scope["path"]
        refusal = self._refusal(path, authorization) or self._not_ready(path)
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            await WebSocket(scope, receive, send).send_denial_response(refusal)

    async def _answer(
        self, scope: Scope, receive: Receive, send: Send, headers: dict[bytes, bytes]
    ) -> None:
        path: str = scope["path"]
        refusal = self._refusal(path, headers.get(b"authorization", b""))
        if refusal is None and path in MODEL_PATHS:
            await self._lifecycle.admitted()
            refusal = self._not_ready(path)
        if refusal is not None:
            await refusal(scope, receive, send)
        elif path in MODEL_PATHS:
            with self._lifecycle.answering():
                await self._app(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, path: str, authorization: bytes) -> Response | None:
        if path in OPEN_PATHS:
            return None
        expected = self._authorizations
        known = [hmac.compare_digest(authorization, each.encode()) for each in expected]
        if expected and not any(known):
            message = "send the server's key as `Authorization: Bearer KEY`"
            return self._refusals.turned_away(path, message, 401, "invalid_api_key")
        return self._not_ready(path) if path in MODEL_PATHS else None

    def _not_ready(self, path: str) -> Response | None:
        phase, refusal = self._lifecycle.phase, self._lifecycle.refusal
        if phase is Phase.READY:
            if refusal is None:
                return None
            return self._refusals.turned_away(path, refusal, 503, "weight_update_open")
        message = f"the server is {phase}; try again later or elsewhere"
        return self._refusals.turned_away(path, message, 503, phase)


class _Recorder:
    """Notes the status and adds the request's id to the response."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._header = (b"x-request-id", request_id.encode())
        self.status = 0
        self.num_bytes = 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), self._header]
        else:
            self.num_bytes += len(message.get("body", b""))
        await self._send(message)


def _request_id(given: bytes | None) -> str:
    """The client's own id where it is usable, else a new one."""
    if given is not None and len(given) <= MAX_ID_LENGTH:
        text = given.decode("latin-1")
        if text.isascii() and text.isprintable() and text.strip():
            return text
    return uuid.uuid4().hex


def _log(scope: Scope, recorder: _Recorder, duration_s: float) -> None:
    client = scope["client"]
    logger.log(
        logging.DEBUG if scope["path"] in PROBE_PATHS else logging.INFO,
        "method=%s path=%s status=%d duration_ms=%.1f bytes=%d client=%s",
        scope["method"],
        # As it was sent: percent signs keep line breaks out of the log.
        scope["raw_path"].decode("ascii", "replace"),
        recorder.status,
        duration_s * 1000.0,
        recorder.num_bytes,
        f"{client[0]}:{client[1]}" if client else "-",
    )
