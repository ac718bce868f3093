"""One call at a server: a message there, and the answer with its status."""

from __future__ import annotations

import asyncio

import grpc

from phalanx.errors import InvalidRequestError
from phalanx.gateway.grpc.message_reader import MessageReader, Pieces, prefix_of
from phalanx.gateway.grpc.metadata import Metadata, message_text, metadata_of, value_of
from phalanx.gateway.grpc.rpc_error import RpcError
from phalanx.gateway.http2.connection import Connection
from phalanx.gateway.http2.frames import ErrorCode
from phalanx.gateway.http2.header_blocks import Headers
from phalanx.wire.robot_inference import NOT_STARTED

Code = grpc.StatusCode
Answer = tuple[bytes, Metadata]

_CODES = {str(code.value[0]).encode(): code for code in Code}
_OF_HTTP = {
    "400": Code.INTERNAL,
    "401": Code.UNAUTHENTICATED,
    "403": Code.PERMISSION_DENIED,
    "404": Code.UNIMPLEMENTED,
    "429": Code.UNAVAILABLE,
    "502": Code.UNAVAILABLE,
    "503": Code.UNAVAILABLE,
    "504": Code.UNAVAILABLE,
}
_OF_RESET: dict[int | None, Code] = {
    None: Code.UNAVAILABLE,
    ErrorCode.REFUSED_STREAM: Code.UNAVAILABLE,
    ErrorCode.CANCEL: Code.CANCELLED,
    ErrorCode.ENHANCE_YOUR_CALM: Code.RESOURCE_EXHAUSTED,
    ErrorCode.INADEQUATE_SECURITY: Code.PERMISSION_DENIED,
}
"""What gRPC makes of an answer that is not its own (doc/http-grpc-status-mapping, PROTOCOL-HTTP2)."""


class ClientCall:
    """`answer` is the server's message and its trailing metadata, or raises `RpcError`."""

    def __init__(self, max_message_bytes: int) -> None:
        self.answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._reader = MessageReader(max_message_bytes)
        self._head: Headers | None = None
        self._trailers: Headers = ()

    def begin(self, connection: Connection, head: bytes, payload: Pieces, num_bytes: int) -> None:
        """Send the request of `num_bytes`, whose header block is `head`."""
        self._stream = connection.open(self)
        self._stream.headers(head)
        self._stream.send((prefix_of(num_bytes), *payload), last=True)

    def cancel(self) -> None:
        """Nobody waits for the answer any more."""
        self.answer.cancel()
        self._stream.reset(ErrorCode.CANCEL)

    def late(self) -> None:
        """The deadline has passed."""
        self._fail(RpcError(Code.DEADLINE_EXCEEDED, "the server has not answered in time"))
        self._stream.reset(ErrorCode.CANCEL)

    # What the stream says.

    def headers(self, headers: Headers) -> None:
        if self._head is not None:
            self._trailers = headers
            return
        status = value_of(headers, b":status") or b""
        if not (len(status) == 3 and status.startswith(b"1")):
            self._head = headers

    def data(self, piece: memoryview) -> None:
        self._stream.consumed(len(piece))
        try:
            self._reader.feed(piece)
        except InvalidRequestError as error:
            words = f"the server's answer cannot be taken: {error}"
            self._fail(RpcError(Code.RESOURCE_EXHAUSTED, words))
            self._stream.reset(ErrorCode.CANCEL)

    def ended(self) -> None:
        if not self._stream.ended:
            # The answer came before the whole request was sent; the rest is of no use.
            self._stream.reset(ErrorCode.CANCEL)
        if self.answer.done():
            return
        try:
            self.answer.set_result(self._answer())
        except RpcError as error:
            self._fail(error)

    def broken(self, code: int | None, words: str, *, started: bool) -> None:
        if started or self._head is not None:
            self._fail(RpcError(_OF_RESET.get(code, Code.INTERNAL), words))
        else:
            self._fail(RpcError(Code.UNAVAILABLE, words, ((NOT_STARTED, "1"),)))

    def _answer(self) -> Answer:
        head = self._head or ()
        http_status = value_of(head, b":status")
        last = self._trailers or head
        number = value_of(last, b"grpc-status")
        if number is None:
            raise _without_status(http_status)
        metadata = metadata_of(last)
        code = _CODES.get(number)
        if code is not Code.OK:
            details = message_text(value_of(last, b"grpc-message") or b"")
            raise RpcError(code or Code.UNKNOWN, details, metadata)
        if self._reader.amid or len(self._reader.whole) != 1:
            raise RpcError(Code.INTERNAL, "the server answered with OK and not with one message")
        message = self._reader.whole[0]
        if message.compressed:
            raise RpcError(
                Code.INTERNAL, "the server's answer is compressed, which it was not asked for"
            )
        return message.data, metadata

    def _fail(self, error: RpcError) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


def _without_status(http_status: bytes | None) -> RpcError:
    shown = (http_status or b"no").decode("ascii", "replace")
    if http_status == b"200":
        return RpcError(Code.UNKNOWN, "the server's answer has no grpc-status")
    code = _OF_HTTP.get(shown, Code.UNKNOWN)
    return RpcError(code, f"the server answered with HTTP status {shown:.20}")
