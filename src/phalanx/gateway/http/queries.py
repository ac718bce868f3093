"""Queries of routes that wait for a change."""

from __future__ import annotations

import math

from phalanx.errors import MalformedRequestError
from phalanx.gateway.http.message import HttpRequest

MAX_WAIT_S = 60.0


def whole(request: HttpRequest, name: str) -> int | None:
    """Raises `MalformedRequestError` for what is no revision; None where it is not given."""
    raw = request.query.get(name)
    if raw is None:
        return None
    if not (raw.isascii() and raw.isdecimal() and len(raw) < 19):
        raise MalformedRequestError(f"{name}={raw!r} must be a revision, a whole number")
    return int(raw)


def wait_s(request: HttpRequest) -> float:
    """How long the caller waits for a change. Raises `MalformedRequestError`."""
    raw = request.query.get("wait_s", "0")
    try:
        seconds = float(raw)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= MAX_WAIT_S:
        raise MalformedRequestError(f"wait_s={raw!r} must be from 0 to {MAX_WAIT_S:g} seconds")
    return seconds
