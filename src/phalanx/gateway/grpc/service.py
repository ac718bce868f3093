"""A gRPC service of the gateway: raw messages in, raw messages out, errors as statuses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import cast

import grpc
import grpc.aio

from phalanx.clock import Clock
from phalanx.errors import InvalidRequestError, PhalanxError
from phalanx.gateway.grpc.statuses import TooManyCallsError, WrongKeyError, status_of
from phalanx.gateway.http.keys import Keys
from phalanx.gateway.http.router import Access

logger = logging.getLogger("phalanx.gateway.access")

Context = grpc.aio.ServicerContext[bytes, bytes]
Unary = Callable[[bytes, Context], Awaitable[bytes]]
Collecting = Callable[[AsyncIterator[bytes], Context], Awaitable[bytes]]
Stream = Callable[[AsyncIterator[bytes], Context], Awaitable[None]]


@dataclass(frozen=True)
class Service:
    """`name` is the service's full name; `access` is the key that its methods ask for.

    Handlers get undecoded messages: `unary` one, `collecting` a stream of them that is answered
    once, `stream` one that they answer by `context.write`. A `PhalanxError` that they raise becomes the
    call's status; their task is cancelled when the caller goes away. Methods that `control` names,
    and all that ask for the administration's key, find a place also when inference has taken its own.
    """

    name: str
    unary: Mapping[str, Unary] = field(default_factory=dict)
    collecting: Mapping[str, Collecting] = field(default_factory=dict)
    stream: Mapping[str, Stream] = field(default_factory=dict)
    access: Access = Access.INFERENCE
    control: frozenset[str] = frozenset()

    def handler(self, door: Door) -> grpc.GenericRpcHandler:
        """What a gRPC server takes; callers come in through `door`."""
        methods = {}
        for make, handlers in (
            # gRPC would read the message of a unary method before anybody has asked for the key.
            (_COLLECTING, {name: _of_one(each) for name, each in self.unary.items()}),
            (_COLLECTING, self.collecting),
            (_STREAM, self.stream),
        ):
            for name, handler in handlers.items():
                path = f"/{self.name}/{name}"
                control = self.access is Access.ADMIN or name in self.control
                guarded = door.guarded(path, cast(_Any, handler), self.access, control=control)
                methods[name] = make(guarded)
        return _SERVICE(self.name, methods)


def _of_one(handler: Unary) -> Collecting:
    """`handler` with the only message of a stream."""

    async def first(messages: AsyncIterator[bytes], context: Context) -> bytes:
        async for message in messages:
            return await handler(message, context)
        raise InvalidRequestError("the call has no message")

    return first


# gRPC's own functions have no types, and make no difference between the kinds of handlers.
_Any = Callable[[object, Context], Awaitable[object]]
_Method = Callable[[_Any], grpc.RpcMethodHandler]
_COLLECTING = cast(_Method, grpc.stream_unary_rpc_method_handler)
_STREAM = cast(_Method, grpc.stream_stream_rpc_method_handler)
_SERVICE = cast(Callable[..., grpc.GenericRpcHandler], grpc.method_handlers_generic_handler)


class Door:
    """Checks keys, counts places, turns errors into statuses, and tells the log of each call, where
    it is asked to. There are `max_calls` places, and as many more for control.
    """

    def __init__(
        self, keys: Keys, clock: Clock, *, max_calls: int, access_log: bool = False
    ) -> None:
        self._keys = keys
        self._clock = clock
        self._access_log = access_log
        self._places, self._control_places = _Places(max_calls), _Places(max_calls)

    def guarded(self, path: str, handler: _Any, access: Access, *, control: bool = False) -> _Any:
        """`handler`, for those who have the key of `access`, which is asked for before any message
        is read.
        """
        places = self._control_places if control else self._places

        async def answer(request: object, context: Context) -> object:
            began_s, code = self._clock.monotonic_s(), "UNKNOWN"
            try:
                self._check(context, access)
                with places:
                    result = await handler(request, context)
                code = "OK"
                return result
            except PhalanxError as error:
                status = status_of(error)
                code = status.code.name
                await context.abort(status.code, status.message, status.metadata)
            except asyncio.CancelledError:
                code = "CANCELLED"
                raise
            finally:
                if self._access_log:
                    duration_ms = (self._clock.monotonic_s() - began_s) * 1000.0
                    logger.info(
                        "method=%s status=%s duration_ms=%.1f client=%s",
                        path,
                        code,
                        duration_ms,
                        context.peer(),
                    )
            raise AssertionError("abort raises")

        return answer

    def _check(self, context: Context, access: Access) -> None:
        if self._keys.allow(access, b""):
            return
        given = dict(tuple(context.invocation_metadata() or ())).get("authorization", "")
        if not self._keys.allow(access, given.encode() if isinstance(given, str) else given):
            raise WrongKeyError(
                "send the gateway's key as the metadata `authorization: Bearer KEY`"
            )


class _Places:
    """Entered by each call that runs."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken = 0

    def __enter__(self) -> None:
        if self._taken >= self._limit:
            raise TooManyCallsError(
                f"{self._limit} calls run at once, more than which are not taken; call again later"
            )
        self._taken += 1

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._taken -= 1
