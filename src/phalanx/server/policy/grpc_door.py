"""The gRPC port of a policy server: `robot.inference.v1.ModelInference` over raw messages.

The port has a thread and an event loop of its own, so that health is told at once however busy the
model is, or the server. Actions are computed in the server's loop.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from types import TracebackType
from typing import NoReturn, Self

import grpc
import grpc.aio

from phalanx.clock import Clock
from phalanx.errors import ConfigurationError, PhalanxError
from phalanx.log import request_context
from phalanx.schema.server_config import POLICY_PORT, ServerConfig
from phalanx.server.policy.backend import Backend
from phalanx.server.policy.door_thread import DoorThread
from phalanx.server.policy.failures import UnauthenticatedError
from phalanx.server.policy.statuses import REFUSAL, status_of
from phalanx.server.tls import Tls
from phalanx.wire.robot_inference import (
    CHECK_HEALTH,
    INFER,
    MODEL_INFERENCE,
    RequestHead,
    decode_health_request,
    encode_health_response,
    peek,
)

logger = logging.getLogger("phalanx.server.access")

Context = grpc.aio.ServicerContext[bytes, bytes]
Server = grpc.aio.Server
STOP_GRACE_S = 0.5
"""For answers that are on their way when everything has been drained."""
MAX_DETAIL = 2000
"""Characters of a status, which travels in a header."""
MAX_ID_LENGTH = 128


class GrpcDoor:
    """Listens when built, on the server's event loop; answers inside `async with`, which ends its
    thread. `backend` can be exchanged.
    """

    def __init__(
        self, config: ServerConfig, backend: Backend, clock: Clock, tls: Tls | None = None
    ) -> None:
        """Raises `ConfigurationError` where it cannot listen."""
        self._backend = backend
        self._clock = clock
        self._log = config.access_log
        key = config.api_key
        self._authorization = None if key is None else f"Bearer {key}".encode()
        self._servers_loop = asyncio.get_running_loop()
        self._thread = DoorThread("phalanx-grpc")
        try:
            self._server, self.address = self._thread.wait_for(self._listening(config, tls))
        except ConfigurationError:
            self._thread.close()
            raise

    def lead_to(self, backend: Backend) -> None:
        """Let `backend` answer from now on."""
        self._backend = backend

    async def __aenter__(self) -> Self:
        await self._thread.run(self._server.start())
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._thread.run(self._server.stop(STOP_GRACE_S))
        self._thread.close()

    # The rest runs in the door's thread.

    async def _infer(self, data: bytes, context: Context) -> bytes:
        started_s = self._clock.monotonic_s()
        head, code, why = RequestHead("", ""), "CANCELLED", "the robot left or its deadline passed"
        try:
            self._check_key(context)
            head = peek(data)
            with request_context(_shown(head.request_id)):
                answer = await self._computed(head, data)
            code, why = "OK", ""
            return answer
        except PhalanxError as error:
            code, why = status_of(error).code.name, " ".join(str(error).split())
            await _refuse(context, error)
        finally:
            if self._log:
                duration_ms = (self._clock.monotonic_s() - started_s) * 1000.0
                logger.info(
                    "method=Infer id=%s model=%s status=%s duration_ms=%.1f bytes=%d client=%s%s",
                    _shown(head.request_id),
                    _shown(head.model_name),
                    code,
                    duration_ms,
                    len(data),
                    context.peer(),
                    f" why={why[:MAX_DETAIL]}" if why else "",
                )

    async def _computed(self, head: RequestHead, data: bytes) -> bytes:
        """The policy's answer; who leaves meanwhile cancels it."""
        work = self._backend.infer(head, data)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._servers_loop))

    async def _health(self, data: bytes, context: Context) -> bytes:
        try:
            return encode_health_response(self._backend.healthy(decode_health_request(data)))
        except PhalanxError as error:
            await _refuse(context, error)

    def _service(self) -> grpc.GenericRpcHandler:
        methods = {
            _name(path): grpc.unary_unary_rpc_method_handler(answer)
            for path, answer in ((INFER, self._infer), (CHECK_HEALTH, self._health))
        }
        service: grpc.GenericRpcHandler = grpc.method_handlers_generic_handler(
            MODEL_INFERENCE, methods
        )
        return service

    def _check_key(self, context: Context) -> None:
        expected = self._authorization
        if expected is None:
            return
        given = dict(context.invocation_metadata() or ()).get("authorization", "")
        if not hmac.compare_digest(str(given).encode(), expected):
            raise UnauthenticatedError(
                "send the server's key as the metadata `authorization: Bearer KEY`"
            )

    async def _listening(self, config: ServerConfig, tls: Tls | None) -> tuple[Server, str]:
        """A server that listens, and where."""
        server = grpc.aio.server(
            options=(
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", config.max_message_bytes),
                ("grpc.max_send_message_length", config.max_message_bytes),
                # Gateways and robots may ask as often as they like whether this host is there.
                ("grpc.http2.max_ping_strikes", 0),
                ("grpc.keepalive_permit_without_calls", 1),
            )
        )
        server.add_generic_rpc_handlers((self._service(),))
        host = f"[{config.host}]" if ":" in config.host else config.host
        port = POLICY_PORT if config.port is None else config.port
        try:
            bound = _open(server, f"{host}:{port}", tls)
        except RuntimeError:
            bound = 0
        if not bound:
            raise ConfigurationError(
                f"cannot listen on host={config.host!r} port={port}: it is in use or not an "
                "address of this machine; choose another port, or 0 for a free one"
            )
        return server, f"{host}:{bound}"


def _open(server: Server, address: str, tls: Tls | None) -> int:
    if tls is None:
        return int(server.add_insecure_port(address))
    credentials = grpc.ssl_server_credentials(((tls.key, tls.cert),))
    return int(server.add_secure_port(address, credentials))


async def _refuse(context: Context, error: PhalanxError) -> NoReturn:
    status = status_of(error)
    metadata = REFUSAL if status.not_started else ()
    await context.abort(status.code, str(error)[:MAX_DETAIL], metadata)
    raise AssertionError("abort raises")


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def _shown(text: str) -> str:
    """A name that a client gave, fit for a line of the log."""
    if len(text) <= MAX_ID_LENGTH and text.isascii() and text.isprintable() and " " not in text:
        return text or "-"
    return ascii(text[:MAX_ID_LENGTH])
