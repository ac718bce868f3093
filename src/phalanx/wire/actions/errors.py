"""The body of a refused or failed request."""

from __future__ import annotations

import msgspec


class _Error(msgspec.Struct, frozen=True):
    code: str
    message: str


class _Body(msgspec.Struct, frozen=True):
    error: _Error


def error_body(code: str, message: str) -> bytes:
    """JSON, whatever the request was: an error is read by people."""
    return msgspec.json.encode(_Body(_Error(code, message)))
