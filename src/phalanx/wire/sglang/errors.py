"""Error bodies of SGLang's native routes."""

from __future__ import annotations

import http

import msgspec

from phalanx.wire.sse import data_line


class _Refusal(msgspec.Struct, frozen=True):
    message: str
    type: str
    code: int
    param: str | None = None
    object: str = "error"


class _Message(msgspec.Struct, frozen=True, omit_defaults=True):
    message: str
    param: str | None = None


class _Failure(msgspec.Struct, frozen=True):
    error: _Message


class _StreamMessage(msgspec.Struct, frozen=True):
    message: str
    type: str
    code: int
    retryable: bool


class _StreamFailure(msgspec.Struct, frozen=True):
    error: _StreamMessage


def refusal_body(message: str, status: int, param: str | None = None) -> bytes:
    """The body for a request whose form is wrong, in its field `param` where that is known."""
    phrase = http.HTTPStatus(status).phrase
    return msgspec.json.encode(_Refusal(message=message, type=phrase, code=status, param=param))


def failure_body(message: str, param: str | None = None) -> bytes:
    """The body for a request that was well formed and could not be served.

    SGLang has the message alone; `param` is the field whose value is at fault, where one is.
    """
    return msgspec.json.encode(_Failure(_Message(message, param)))


def stream_error_line(message: str, status: int, *, retryable: bool) -> bytes:
    """The event that ends a stream which had begun."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = _StreamMessage(message=message, type=kind, code=status, retryable=retryable)
    return data_line(msgspec.json.encode(_StreamFailure(error)))
