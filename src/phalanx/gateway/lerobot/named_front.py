"""A gRPC port for LeRobot's clients that tells robots apart by the host name that they connect to.

What a client typed as the server's address comes with each of its calls, but the server of gRPC that
runs on an event loop does not hand it on; the one that runs on threads does. A robot that waits for
actions holds one of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NoReturn, Protocol

import grpc

from phalanx.errors import ConfigurationError, PhalanxError
from phalanx.gateway.grpc.front import GrpcLimits, Tls
from phalanx.gateway.grpc.metadata import Metadata
from phalanx.gateway.grpc.statuses import status_of
from phalanx.gateway.http.keys import Keys
from phalanx.gateway.http.router import Access
from phalanx.gateway.lerobot.caller import Caller, session_id_of
from phalanx.gateway.lerobot.service import LeRobotService
from phalanx.wire.lerobot import SERVICE, decode_upload_part

MAX_THREADS = 512

Call = Callable[[Caller], Coroutine[None, None, bytes]]


@dataclass(frozen=True)
class Listener:
    """Where to listen, and whom to let in. Port 0 is any free one. `fps` is the rate of its robots,
    where that is not the gateway's.
    """

    host: str
    port: int
    keys: Keys = field(default_factory=Keys)
    limits: GrpcLimits = field(default_factory=GrpcLimits)
    tls: Tls | None = None
    fps: float | None = None


class _CallDetails(Protocol):
    host: bytes


class _RpcEvent(Protocol):
    call_details: _CallDetails


class _HandlerCall(Protocol):
    """What is used of `grpc.HandlerCallDetails`."""

    method: str
    invocation_metadata: tuple[tuple[str, str | bytes], ...]


class Context(Protocol):
    """What is used of `grpc.ServicerContext`, which says nothing of its types."""

    _rpc_event: _RpcEvent

    def peer(self) -> str: ...

    def invocation_metadata(self) -> tuple[tuple[str, str | bytes], ...]: ...

    def cancel(self) -> object: ...

    def add_callback(self, callback: Callable[[], object]) -> bool: ...

    def set_trailing_metadata(self, metadata: Metadata) -> None: ...

    def abort(self, code: grpc.StatusCode, details: str) -> NoReturn: ...


class NamedFront:
    """Made and used on the gateway's event loop. `start`, then `close`, which lets calls end."""

    def __init__(self, robots: LeRobotService, listener: Listener) -> None:
        self._robots = robots
        self._listener = listener
        self._port = listener.port
        self._loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="lerobot")
        limit = listener.limits.max_message_bytes
        self._server = grpc.server(
            self._threads,
            options=(
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", limit),
                ("grpc.max_send_message_length", limit),
            ),
            maximum_concurrent_rpcs=MAX_THREADS,
        )
        methods = {
            "Ready": grpc.unary_unary_rpc_method_handler(self._ready),
            "SendPolicyInstructions": grpc.unary_unary_rpc_method_handler(self._instruct),
            "SendObservations": grpc.stream_unary_rpc_method_handler(self._observe),
            "GetActions": grpc.unary_unary_rpc_method_handler(self._actions),
        }
        self._door = _Door(listener.keys, methods)
        self._server.add_generic_rpc_handlers((self._door,))

    async def start(self) -> int:
        """Listen, and return the port. Raises `ConfigurationError` where that cannot be done."""
        listener = self._listener
        host = f"[{listener.host}]" if ":" in listener.host else listener.host
        address = f"{host}:{listener.port}"
        try:
            if listener.tls is None:
                port = self._server.add_insecure_port(address)
            else:
                pairs = ((listener.tls.key, listener.tls.cert),)
                port = self._server.add_secure_port(address, grpc.ssl_server_credentials(pairs))
        except RuntimeError as error:
            raise ConfigurationError(
                f"cannot listen on {address} for LeRobot's clients: it is in use, or not an address "
                "of this machine; choose another --lerobot-port"
            ) from error
        self._port = int(port)
        self._server.start()
        return self._port

    async def close(self, drain_s: float = 0.0) -> None:
        """Take no more calls, let those that run end for `drain_s` seconds, then cancel them."""
        stopped = self._server.stop(drain_s)
        await self._loop.run_in_executor(None, stopped.wait)
        self._threads.shutdown(wait=False)
        self._door.close()

    # The handlers run on threads; everything else of the gateway is on its event loop.

    def _ready(self, message: bytes, context: Context) -> bytes:
        return self._answer(context, self._robots.ready)

    def _instruct(self, message: bytes, context: Context) -> bytes:
        return self._answer(context, lambda caller: self._robots.instruct(caller, message))

    def _actions(self, message: bytes, context: Context) -> bytes:
        return self._answer(context, self._robots.actions)

    def _observe(self, messages: Iterator[bytes], context: Context) -> bytes:
        upload = self._robots.upload()
        payload: bytes | memoryview | None = None
        # The messages are waited for on this thread, so the loop has the timer.
        ending = self._robots.end_upload(self._caller(context), context.cancel)
        timer = asyncio.run_coroutine_threadsafe(ending, self._loop)
        try:
            for message in messages:
                payload = upload.add(decode_upload_part(message)) or payload
            upload.close()
        except PhalanxError as error:
            _refuse(context, error)
        finally:
            timer.cancel()
        return self._answer(context, lambda caller: self._robots.keep(caller, payload))

    def _answer(self, context: Context, call: Call) -> bytes:
        future = asyncio.run_coroutine_threadsafe(call(self._caller(context)), self._loop)
        if not context.add_callback(future.cancel):
            future.cancel()
        try:
            return future.result()
        except PhalanxError as error:
            _refuse(context, error)
        except CancelledError:
            context.abort(grpc.StatusCode.CANCELLED, "the call was cancelled")

    def _caller(self, context: Context) -> Caller:
        # The port too: what was typed may be the same for two of them, as with a proxy in between.
        address = f"{_authority(context)} (port {self._port})"
        session_id = session_id_of(context.invocation_metadata())
        return Caller(context.peer(), address, session_id, self._listener.fps)


class _Door(grpc.GenericRpcHandler):
    """Looks at a call's key before one of the robots' threads is given to it."""

    def __init__(self, keys: Keys, methods: Mapping[str, object]) -> None:
        self._keys = keys
        self._methods = {f"/{SERVICE}/{name}": method for name, method in methods.items()}
        self._refusal = _Refusal()
        # As a stream, of which nothing is read: it waits for no message of the caller's.
        self._refused = grpc.stream_unary_rpc_method_handler(self._refusal)

    def service(self, call: _HandlerCall) -> object:
        given = dict(call.invocation_metadata).get("authorization", "")
        encoded = given.encode() if isinstance(given, str) else given
        if not self._keys.allow(Access.INFERENCE, encoded):
            return self._refused
        return self._methods.get(call.method)

    def close(self) -> None:
        self._refusal.experimental_thread_pool.shutdown(wait=False)


class _Refusal:
    """Answers who has no key. gRPC runs it on the pool that it brings, of one thread."""

    def __init__(self) -> None:
        self.experimental_thread_pool = ThreadPoolExecutor(1, thread_name_prefix="lerobot-refusal")

    def __call__(self, messages: object, context: Context) -> NoReturn:
        context.abort(
            grpc.StatusCode.UNAUTHENTICATED,
            "send the gateway's key as the metadata `authorization: Bearer KEY`",
        )


def _refuse(context: Context, error: PhalanxError) -> NoReturn:
    status = status_of(error)
    context.set_trailing_metadata(status.metadata)
    context.abort(status.code, status.message)


def _authority(context: Context) -> str:
    """What the client typed as the server's address.

    gRPC keeps it where no public name leads to; `test_named_front.py` fails where it has moved.
    """
    return context._rpc_event.call_details.host.decode("ascii", "replace").lower()
