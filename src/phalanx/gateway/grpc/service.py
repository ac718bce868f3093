"""A gRPC service of the gateway: raw messages in, raw messages out, errors as statuses."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from phalanx.clock import Clock
from phalanx.gateway.grpc.message_reader import Pieces
from phalanx.gateway.grpc.metadata import Metadata
from phalanx.gateway.grpc.statuses import TooManyCallsError, WrongKeyError
from phalanx.gateway.http.keys import Keys
from phalanx.gateway.http.router import Access

logger = logging.getLogger("phalanx.gateway.access")


class Context(Protocol):
    """The call that a handler answers. `authority` is what the caller typed as the address."""

    @property
    def authority(self) -> str: ...

    def peer(self) -> str:
        """The caller's connection, as gRPC writes it: `ipv4:HOST:PORT`."""
        ...

    def invocation_metadata(self) -> Metadata: ...

    def time_remaining(self) -> float | None:
        """Seconds; None where the caller waits for ever."""
        ...

    def set_trailing_metadata(self, metadata: Metadata) -> None: ...

    async def write(self, message: bytes) -> None:
        """One of the answers of a stream; waits until the caller has room for more."""
        ...


class Call(Context, Protocol):
    """What a method takes its messages from."""

    def messages(self) -> AsyncIterator[bytes]: ...

    async def only(self) -> Pieces:
        """The message of a call that is whole. Raises `InvalidRequestError` where it has none."""
        ...


Unary = Callable[[bytes, Context], Awaitable[bytes]]
Relayed = Callable[[Pieces, Context], Awaitable[bytes]]
Collecting = Callable[[AsyncIterator[bytes], Context], Awaitable[bytes]]
Stream = Callable[[AsyncIterator[bytes], Context], Awaitable[None]]
Serve = Callable[[Call], Awaitable[bytes | None]]


@dataclass(frozen=True)
class Method:
    """`serve` answers a call, and begins when all of it has arrived where it is `whole`."""

    path: str
    serve: Serve
    access: Access
    control: bool
    whole: bool = False


@dataclass(frozen=True)
class Service:
    """`name` is the service's full name; `access` is the key that its methods ask for.

    Handlers get undecoded messages: `unary` one, `relayed` one as it was read, `collecting` a stream of them that is answered
    once, `stream` one that they answer by `context.write`. A `PhalanxError` that they raise becomes the
    call's status; their task is cancelled when the caller goes away. Methods that `control` names,
    and all that ask for the administration's key, find a place also when inference has taken its own.
    """

    name: str
    unary: Mapping[str, Unary] = field(default_factory=dict)
    relayed: Mapping[str, Relayed] = field(default_factory=dict)
    collecting: Mapping[str, Collecting] = field(default_factory=dict)
    stream: Mapping[str, Stream] = field(default_factory=dict)
    access: Access = Access.INFERENCE
    control: frozenset[str] = frozenset()

    def methods(self) -> list[Method]:
        served = [(name, _of_one(each), True) for name, each in self.unary.items()]
        served += [(name, _of_pieces(each), True) for name, each in self.relayed.items()]
        served += [(name, _of_many(each), False) for name, each in self.collecting.items()]
        served += [(name, _of_stream(each), False) for name, each in self.stream.items()]
        return [
            Method(
                f"/{self.name}/{name}",
                serve,
                self.access,
                control=self.access is Access.ADMIN or name in self.control,
                whole=whole,
            )
            for name, serve, whole in served
        ]


def _of_one(handler: Unary) -> Serve:
    """`handler` with the only message of a call."""

    async def serve(call: Call) -> bytes:
        return await handler(b"".join(await call.only()), call)

    return serve


def _of_pieces(handler: Relayed) -> Serve:
    async def serve(call: Call) -> bytes:
        return await handler(await call.only(), call)

    return serve


def _of_many(handler: Collecting) -> Serve:
    async def serve(call: Call) -> bytes:
        return await handler(call.messages(), call)

    return serve


def _of_stream(handler: Stream) -> Serve:
    async def serve(call: Call) -> None:
        await handler(call.messages(), call)

    return serve


class Door:
    """Checks keys, counts places, and tells the log of each call, where it is asked to. There are
    `max_calls` places, and as many more for control.
    """

    def __init__(
        self, keys: Keys, clock: Clock, *, max_calls: int, access_log: bool = False
    ) -> None:
        self.clock = clock
        self.access_log = access_log
        self._keys = keys
        self._places, self._control_places = _Places(max_calls), _Places(max_calls)

    def visit(self, method: Method, peer: str) -> Visit:
        return Visit(self, method, peer)

    def enter(self, method: Method, authorization: bytes) -> _Places:
        """Raises `WrongKeyError` or `TooManyCallsError`; the place is to be left."""
        if not self._keys.allow(method.access, authorization):
            raise WrongKeyError(
                "send the gateway's key as the metadata `authorization: Bearer KEY`"
            )
        places = self._control_places if method.control else self._places
        places.take()
        return places


class Visit:
    """One call's: `enter`, before any message is read, and `leave`, once."""

    def __init__(self, door: Door, method: Method, peer: str) -> None:
        self._door, self._method, self._peer = door, method, peer
        self._began_s = door.clock.monotonic_s()
        self._places: _Places | None = None

    def enter(self, authorization: bytes) -> None:
        """Raises what the caller is to be told where it may not."""
        self._places = self._door.enter(self._method, authorization)

    def leave(self, code: str) -> None:
        """`code` is how the call ended."""
        places, self._places = self._places, None
        if places is not None:
            places.leave()
        if self._door.access_log:
            logger.info(
                "method=%s status=%s duration_ms=%.1f client=%s",
                self._method.path,
                code,
                (self._door.clock.monotonic_s() - self._began_s) * 1000.0,
                self._peer,
            )


class _Places:
    """Taken by each call that runs."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken = 0

    def take(self) -> None:
        if self._taken >= self._limit:
            raise TooManyCallsError(
                f"{self._limit} calls run at once, more than which are not taken; call again later"
            )
        self._taken += 1

    def leave(self) -> None:
        self._taken -= 1
