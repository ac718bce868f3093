"""What a control process answers beside the roles' documents, as far as a gateway reads it."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from phalanx.errors import MalformedRequestError


class RoleNames(msgspec.Struct, frozen=True):
    """`GET /v1/roles`."""

    roles: tuple[str, ...]


class ToldEvent(msgspec.Struct, frozen=True):
    """One thing that happened. `model` and `engine_id` are empty where it concerns all of them."""

    number: int
    wall_s: float
    role: str
    kind: str
    model: str = ""
    engine_id: str = ""
    detail: str = ""


class Events(msgspec.Struct, frozen=True):
    """`GET /v1/events`; `last` is the newest event's number."""

    epoch: str
    last: int
    events: tuple[ToldEvent, ...]


T = TypeVar("T")


def decoded(body: bytes, kind: type[T]) -> T:
    """Raises `MalformedRequestError` for what is none."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedRequestError(
            f"the control process answered something else: {error}"
        ) from None
