"""What a worker says when something raised that it cannot go on after."""

from __future__ import annotations

import traceback

from phalanx.engine.workers.messages import Crashed
from phalanx.engine.workers.packets import UndecodablePacketError
from phalanx.engine.workers.runtime import DuringRequestError

_MAX_ERROR = 8_000
_MAX_TRACEBACK = 40_000
"""Characters of a crash that are sent; a message is one packet."""


def crash(phase: str, error: BaseException) -> Crashed:
    """What raised while the worker was `phase`, and during which request, where that is known."""
    number = None
    if isinstance(error, UndecodablePacketError | DuringRequestError):
        number = error.number
    if isinstance(error, DuringRequestError):
        error = error.cause
    what = "".join(traceback.format_exception_only(error)).strip()
    trace = "".join(traceback.format_exception(error))
    return Crashed(phase, _text(what[:_MAX_ERROR]), _text(trace[-_MAX_TRACEBACK:]), number)


def _text(text: str) -> str:
    """Without the lone surrogates that file names may bring and that no message can carry."""
    return text.encode("utf-8", "backslashreplace").decode()
