"""Bodies of SGLang's control routes."""

from __future__ import annotations

import msgspec

from phalanx.schema.control import PauseMode
from phalanx.wire.body import BodyDecoder


class AbortBody(msgspec.Struct, frozen=True, kw_only=True):
    """`/abort_request`: `rid` is the beginning of ids; empty means none without `abort_all`."""

    rid: str | None = None
    abort_all: bool | None = None


class PauseBody(msgspec.Struct, frozen=True, kw_only=True):
    """`/pause_generation`."""

    mode: PauseMode = PauseMode.ABORT


class _Done(msgspec.Struct, frozen=True, kw_only=True):
    message: str
    status: str = "ok"


_ABORT = BodyDecoder(AbortBody)
_PAUSE = BodyDecoder(PauseBody)


def parse_abort(body: bytes) -> AbortBody:
    """The body, which may be empty."""
    return _ABORT.decode(body or b"{}")


def parse_pause(body: bytes) -> PauseBody:
    """The body, which may be empty."""
    return _PAUSE.decode(body or b"{}")


def done_body(message: str) -> bytes:
    """The answer to a control operation that was applied."""
    return msgspec.json.encode(_Done(message=message))
