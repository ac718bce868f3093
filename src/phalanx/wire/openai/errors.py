"""OpenAI's error shape."""

from __future__ import annotations

import msgspec

from phalanx.wire.sse import data_line


class _Error(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | int | None


class _Body(msgspec.Struct, frozen=True):
    error: _Error


def error_body(
    message: str, status: int, *, param: str | None = None, code: str | None = None
) -> bytes:
    """The body of a failed request."""
    return msgspec.json.encode(_Body(_Error(message, error_type(status), param, code)))


def stream_error_line(message: str, status: int) -> bytes:
    """The event that ends a stream which had begun."""
    return data_line(error_body(message, status))


def error_type(status: int) -> str:
    """OpenAI's word for a status."""
    if status == 401:
        return "authentication_error"
    if status == 404:
        return "not_found_error"
    if status == 429:
        return "rate_limit_error"
    if status < 500:
        return "invalid_request_error"
    return "service_unavailable_error" if status == 503 else "server_error"
