"""A gRPC service of the gateway: raw messages in, raw messages out, errors as statuses."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import NoReturn, cast

import grpc
import grpc.aio

from phalanx.errors import PhalanxError
from phalanx.gateway.grpc.statuses import status_of
from phalanx.gateway.http.keys import Keys
from phalanx.gateway.http.router import Access

Context = grpc.aio.ServicerContext[bytes, bytes]
Unary = Callable[[bytes, Context], Awaitable[bytes]]
Collecting = Callable[[AsyncIterator[bytes], Context], Awaitable[bytes]]
Stream = Callable[[AsyncIterator[bytes], Context], Awaitable[None]]


@dataclass(frozen=True)
class Service:
    """`name` is the service's full name; `access` is the key that its methods ask for.

    Handlers get undecoded messages: `unary` one, `collecting` a stream of them that is answered
    once, `stream` one that they answer by `context.write`. A `PhalanxError` that they raise becomes the
    call's status; their task is cancelled when the caller goes away.
    """

    name: str
    unary: Mapping[str, Unary] = field(default_factory=dict)
    collecting: Mapping[str, Collecting] = field(default_factory=dict)
    stream: Mapping[str, Stream] = field(default_factory=dict)
    access: Access = Access.INFERENCE

    def handler(self, keys: Keys) -> grpc.GenericRpcHandler:
        """What a gRPC server takes; it lets those callers in that `keys` allow."""
        door = _Door(keys, self.access)
        methods = {
            **{name: _UNARY(door.answering(each)) for name, each in self.unary.items()},
            **{name: _COLLECTING(door.answering(each)) for name, each in self.collecting.items()},
            **{name: _STREAM(door.streaming(each)) for name, each in self.stream.items()},
        }
        make = cast(Callable[..., grpc.GenericRpcHandler], grpc.method_handlers_generic_handler)
        return make(self.name, methods)


# gRPC's own functions have no types.
_Method = Callable[[object], grpc.RpcMethodHandler]
_UNARY = cast(_Method, grpc.unary_unary_rpc_method_handler)
_COLLECTING = cast(_Method, grpc.stream_unary_rpc_method_handler)
_STREAM = cast(_Method, grpc.stream_stream_rpc_method_handler)


async def refuse(context: Context, error: PhalanxError) -> NoReturn:
    """End the call with the status of `error`."""
    status = status_of(error)
    await context.abort(status.code, status.message, status.metadata)
    raise AssertionError("abort raises")


class _Door:
    """Checks the caller's key, and turns errors into statuses."""

    def __init__(self, keys: Keys, access: Access) -> None:
        self._keys = keys
        self._access = access

    def answering(self, handler: Unary | Collecting) -> Unary:
        async def answer(request: bytes, context: Context) -> bytes:
            await self._check(context)
            try:
                return await cast(Unary, handler)(request, context)
            except PhalanxError as error:
                await refuse(context, error)

        return answer

    def streaming(self, handler: Stream) -> Stream:
        async def answer(requests: AsyncIterator[bytes], context: Context) -> None:
            await self._check(context)
            try:
                await handler(requests, context)
            except PhalanxError as error:
                await refuse(context, error)

        return answer

    async def _check(self, context: Context) -> None:
        given = dict(context.invocation_metadata() or ()).get("authorization", "")
        if not self._keys.allow(self._access, given.encode() if isinstance(given, str) else given):
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED,
                "send the gateway's key as the metadata `authorization: Bearer KEY`",
            )
