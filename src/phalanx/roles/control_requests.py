"""What a request to the control process carries, and the form of its answers."""

from __future__ import annotations

import math
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from phalanx.errors import InvalidInputError
from phalanx.roles.control_guard import JSON

MAX_WAIT_S = 60.0
MAX_BODY_BYTES = 1024 * 1024
T = TypeVar("T")


def json_answer(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type=JSON)


async def json_body(request: Request, kind: type[T]) -> T:
    """The request's JSON; an empty body is an empty object."""
    received = bytearray()
    async for part in request.stream():
        received += part
        if len(received) > MAX_BODY_BYTES:
            raise InvalidInputError(f"the body is larger than {MAX_BODY_BYTES} bytes")
    try:
        return msgspec.json.decode(received or b"{}", type=kind)
    except msgspec.ValidationError as error:
        raise InvalidInputError(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"the body is not JSON: {error}") from None


def whole_number(request: Request, name: str) -> int | None:
    """The number of this name in the query; None without."""
    raw = request.query_params.get(name)
    if raw is None:
        return None
    if not (raw.isascii() and raw.isdecimal() and len(raw) < 19):
        raise InvalidInputError(f"{name}={raw!r} must be a whole number")
    return int(raw)


def waiting_s(request: Request) -> float:
    """How long to wait for a change, by `?wait_s=`."""
    raw = request.query_params.get("wait_s", "0")
    try:
        wait_s = float(raw)
    except ValueError:
        wait_s = math.nan
    if not 0 <= wait_s <= MAX_WAIT_S:
        raise InvalidInputError(f"wait_s={raw!r} must be from 0 to {MAX_WAIT_S:g} seconds")
    return wait_s
