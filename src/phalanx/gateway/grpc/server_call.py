"""One call of a client: its messages as they arrive, the task that answers it, and how it ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

import grpc

from phalanx.errors import InvalidInputError, InvalidRequestError, PhalanxError
from phalanx.gateway.grpc.message_reader import (
    ENCODINGS,
    Message,
    MessageReader,
    Pieces,
    decompressed,
    prefixed,
)
from phalanx.gateway.grpc.metadata import Metadata, headers_of, message_field, metadata_of
from phalanx.gateway.grpc.request_head import RequestHead
from phalanx.gateway.grpc.service import Method, Visit
from phalanx.gateway.grpc.statuses import Status, UnknownCompressionError, status_of
from phalanx.gateway.http.deadline import Deadline
from phalanx.gateway.http2.header_blocks import Headers, written
from phalanx.gateway.http2.stream import Stream

logger = logging.getLogger(__name__)

_OK = Status(grpc.StatusCode.OK, "")
_HEAD = (
    (b":status", b"200"),
    (b"content-type", b"application/grpc"),
    (b"grpc-accept-encoding", b", ".join((b"identity", *ENCODINGS))),
)
_HEAD_BLOCK = written(_HEAD)
_OK_BLOCK = written(((b"grpc-status", b"0"),))
_SLACK_S = 0.1
"""How much later than the caller's deadline a call is ended that does not end by itself."""
_LONG_BYTES = 16 * 1024
"""What is decompressed beside the event loop."""


@dataclass(frozen=True)
class CallLimits:
    """`body_timeout_s` is between two pieces of the message of a call that has one."""

    max_message_bytes: int
    body_timeout_s: float


class Calls(Protocol):
    """The connection that the call is of."""

    peer: str
    limits: CallLimits

    def ended(self, call: ServerCall) -> None: ...


class ServerCall:
    """Hears its stream, and is the `Call` of its method. Ends with one status, unless the caller
    leaves before.
    """

    def __init__(
        self, stream: Stream, head: RequestHead, method: Method, visit: Visit, calls: Calls
    ) -> None:
        self._stream, self._head = stream, head
        self._method, self._visit, self._calls = method, visit, calls
        self._loop = asyncio.get_running_loop()
        self._reader = MessageReader(calls.limits.max_message_bytes)
        self._all_here = False
        self._kept_bytes = 0
        self._arrived: asyncio.Future[None] | None = None
        self._trailing: Metadata = ()
        self._begun = self._over = self._late = False
        self._task: asyncio.Task[None] | None = None
        self._end_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._arriving = Deadline(self._loop, self._stopped_arriving)

    def begin(self) -> None:
        """Let the caller in, or refuse the call."""
        try:
            self._visit.enter(self._head.authorization)
            if self._head.encoding != b"identity" and self._head.encoding not in ENCODINGS:
                raise UnknownCompressionError(
                    f"messages compressed as {self._head.encoding[:80]!r} are not understood; "
                    f"known: {', '.join(name.decode() for name in ENCODINGS)}"
                )
        except PhalanxError as error:
            self._finish(status_of(error))
            return
        if self._head.timeout_s is not None:
            self._end_s = self._loop.time() + self._head.timeout_s
            self._timer = self._loop.call_at(self._end_s + _SLACK_S, self._passed)
        if self._method.whole:
            self._arriving.set(self._calls.limits.body_timeout_s)
        else:
            self._start()

    def cancel(self) -> None:
        """End it because the gateway has to."""
        self._finish(Status(grpc.StatusCode.UNAVAILABLE, "the gateway has stopped"))
        if self._task is not None:
            self._task.cancel()

    # What the stream says.

    def headers(self, headers: Headers) -> None:
        """A caller's trailers mean nothing in gRPC."""

    def data(self, piece: memoryview) -> None:
        if self._over:
            return
        try:
            self._reader.feed(piece)
            if self._method.whole and len(self._reader.whole) > 1:
                raise InvalidInputError("the call has more than one message")
        except PhalanxError as error:
            self._fail(error)
            return
        # The next message may arrive while nothing waits, and no more than a window while it does.
        if self._method.whole:
            self._arriving.set(self._calls.limits.body_timeout_s)
            self._stream.consumed(len(piece))
        elif not self._reader.whole:
            self._stream.consumed(len(piece))
        else:
            self._kept_bytes += len(piece)
            self._wake()

    def ended(self) -> None:
        if self._over:
            return
        self._all_here = True
        self._arriving.close()
        if self._reader.amid:
            self._fail(InvalidInputError("the call ends within a message"))
        elif self._method.whole:
            self._start()
        else:
            self._wake()

    def broken(self, code: int | None, words: str, *, started: bool) -> None:
        """The caller has left."""
        self._leave("CANCELLED")
        if self._task is not None:
            self._task.cancel()

    # What the method asks.

    @property
    def authority(self) -> str:
        return self._head.authority

    def peer(self) -> str:
        return self._calls.peer

    def invocation_metadata(self) -> Metadata:
        return metadata_of(self._head.headers)

    def time_remaining(self) -> float | None:
        return None if self._end_s is None else max(0.0, self._end_s - self._loop.time())

    def set_trailing_metadata(self, metadata: Metadata) -> None:
        self._trailing = metadata

    async def write(self, message: bytes) -> None:
        if not self._begun:
            self._begun = True
            self._stream.headers(_HEAD_BLOCK)
        self._stream.send((prefixed(message), message))
        await self._stream.drained()

    async def messages(self) -> AsyncIterator[bytes]:
        whole = self._reader.whole
        while True:
            while whole:
                yield await self._plain(whole.popleft())
            if self._kept_bytes:
                self._stream.consumed(self._kept_bytes)
                self._kept_bytes = 0
            if self._all_here:
                return
            self._arrived = self._loop.create_future()
            await self._arrived

    async def only(self) -> Pieces:
        whole = self._reader.whole
        if not whole:
            raise InvalidRequestError("the call has no message")
        message = whole.popleft()
        return (await self._plain(message),) if message.compressed else message.pieces

    # The rest.

    async def _plain(self, message: Message) -> bytes:
        data = message.data
        if not message.compressed:
            return data
        encoding, limit = self._head.encoding, self._calls.limits.max_message_bytes
        if encoding not in ENCODINGS:
            raise InvalidInputError("the message is compressed, and no grpc-encoding says how")
        if len(data) < _LONG_BYTES:
            return decompressed(data, encoding, limit)
        return await asyncio.to_thread(decompressed, data, encoding, limit)

    def _wake(self) -> None:
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    def _start(self) -> None:
        self._task = self._loop.create_task(self._run())
        self._task.add_done_callback(self._ran)

    async def _run(self) -> None:
        try:
            answer = await self._method.serve(self)
        except PhalanxError as error:
            self._finish(status_of(error))
        else:
            self._finish(_OK, answer)

    def _ran(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            self._finish(Status(grpc.StatusCode.CANCELLED, "the gateway has given the call up"))
        elif (error := task.exception()) is not None:
            logger.error("%s failed", self._method.path, exc_info=error)
            self._finish(Status(grpc.StatusCode.INTERNAL, "the gateway failed; its log tells why"))

    def _passed(self) -> None:
        self._finish(Status(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline has passed"))
        if self._task is not None:
            self._task.cancel()

    def _stopped_arriving(self) -> None:
        words = f"nothing of the message has come for {self._calls.limits.body_timeout_s:g} s"
        self._finish(Status(grpc.StatusCode.DEADLINE_EXCEEDED, words))

    def _fail(self, error: PhalanxError) -> None:
        """What arrives cannot be read: whoever reads it need not go on."""
        self._finish(status_of(error))
        if self._task is not None:
            self._task.cancel()

    def _finish(self, status: Status, answer: bytes | None = None) -> None:
        if self._over:
            return
        self._leave(status.code.name)
        stream, trailing = self._stream, (*self._trailing, *status.metadata)
        if status is _OK and not trailing:
            block = _OK_BLOCK
        else:
            block = written(_status_fields(status, trailing))
        if answer is not None:
            if not self._begun:
                stream.headers(_HEAD_BLOCK)
            stream.send((prefixed(answer), answer), trailers=block)
        elif self._begun:
            stream.send((), trailers=block)
        else:
            stream.headers(_HEAD_BLOCK + block, last=True)

    def _leave(self, code: str) -> None:
        if self._over:
            return
        self._over = True
        self._arriving.close()
        if self._timer is not None:
            self._timer.cancel()
        self._visit.leave(code)
        self._calls.ended(self)


def refuse(stream: Stream, status: int) -> None:
    """Answer what is no gRPC call with an HTTP status."""
    stream.headers(written(((b":status", str(status).encode()),)), last=True)


def refuse_method(stream: Stream, path: str) -> None:
    status = Status(grpc.StatusCode.UNIMPLEMENTED, f"{path[:200]!r} is not served here")
    stream.headers(_HEAD_BLOCK + written(_status_fields(status, ())), last=True)


def _status_fields(status: Status, trailing: Metadata) -> list[tuple[bytes, bytes]]:
    number = status.code.value[0]
    fields = [(b"grpc-status", str(number).encode())]
    if status.message:
        fields.append((b"grpc-message", message_field(status.message)))
    return fields + headers_of(trailing)
