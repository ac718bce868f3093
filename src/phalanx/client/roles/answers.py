"""What an answer's status says, as the exception of this package that says the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import msgspec

from phalanx.errors import (
    BodyTooLargeError,
    ConfigurationError,
    DeadlineExceededError,
    EngineOverloadedError,
    EngineUnavailableError,
    InvalidRequestError,
    NoServerError,
    PhalanxError,
    RequestFailedError,
)
from phalanx.wire.discovery import refusal_of

JsonObject: TypeAlias = dict[str, object]
_MAX_SHOWN = 500
_CLASSES: Mapping[int, type[PhalanxError]] = {
    400: InvalidRequestError,
    408: DeadlineExceededError,
    413: BodyTooLargeError,
    422: InvalidRequestError,
    429: EngineOverloadedError,
    502: EngineUnavailableError,
    503: EngineUnavailableError,
    504: DeadlineExceededError,
}
_HINTS: Mapping[int, str] = {
    401: "give the key as api_key (of the gateway) or engine_api_key (of engines)",
    403: "give another key",
    404: "there is nothing at this address; a role is at http://GATEWAY:PORT/ROLE",
    405: "it is no role's address; a role is at http://GATEWAY:PORT/ROLE",
}


class _Told(msgspec.Struct, frozen=True):
    message: str = ""
    param: str | None = None
    code: str | int | None = None


class _OpenAIError(msgspec.Struct, frozen=True):
    error: _Told | str


class _FlatError(msgspec.Struct, frozen=True):
    message: str
    param: str | None = None


_openai = msgspec.json.Decoder(_OpenAIError)
_flat = msgspec.json.Decoder(_FlatError)


def failure_of(
    where: str, status: int, headers: Mapping[str, str], body: bytes, *, by_gateway: bool
) -> PhalanxError:
    """What to raise for an answer of `status` that `where` gave.

    A gateway says 503 with `Retry-After` of a request that never started; an engine may say it of
    one that did.
    """
    told = refusal_of(body)
    if told is not None:
        return told
    said = _told(body)
    message = f"{where} answered {status}: {said.message}"
    if status in _HINTS:
        return ConfigurationError(f"{message}; {_HINTS[status]}")
    retry_after = headers.get("retry-after", "")
    if by_gateway and status == 503 and retry_after.isascii() and retry_after.isdecimal():
        return NoServerError(message, retry_after_s=int(retry_after))
    kind = _CLASSES.get(status)
    if kind is None:
        kind = InvalidRequestError if 400 <= status < 500 else RequestFailedError
    if issubclass(kind, InvalidRequestError):
        return kind(message, field=said.param or "")
    return kind(message)


def event_failure(event: JsonObject) -> PhalanxError | None:
    """What to raise for an event that says that the stream has failed; None for any other."""
    if "error" not in event:
        return None
    try:
        told = msgspec.convert(event, _OpenAIError).error
    except msgspec.ValidationError:
        return RequestFailedError(str(event["error"])[:_MAX_SHOWN])
    if isinstance(told, str):
        return RequestFailedError(told)
    refused = isinstance(told.code, int) and 400 <= told.code < 500
    return (InvalidRequestError if refused else RequestFailedError)(told.message)


def json_object(where: str, body: bytes) -> JsonObject:
    """Raises `RequestFailedError` for what is no JSON object."""
    value = json_value(where, body)
    if isinstance(value, list):
        raise RequestFailedError(f"{where} answered a list instead of an object")
    return value


def json_value(where: str, body: bytes) -> JsonObject | list[JsonObject]:
    """Raises `RequestFailedError` for what is neither a JSON object nor a list of them."""
    try:
        return _value.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestFailedError(f"{where} answered what cannot be read: {error}") from error


_value: msgspec.json.Decoder[JsonObject | list[JsonObject]] = msgspec.json.Decoder(
    dict[str, object] | list[dict[str, object]]
)


def _told(body: bytes) -> _Told | _FlatError:
    """What the body says in words, and of which field."""
    for decoder in (_openai, _flat):
        try:
            found = decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
        if isinstance(found, _FlatError):
            return found
        return _Told(found.error) if isinstance(found.error, str) else found.error
    return _Told(body[:_MAX_SHOWN].decode("utf-8", "replace") or "nothing")
