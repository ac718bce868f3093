"""What went wrong for one robot, told to its operator in the status of the robot's own calls.

LeRobot's client logs the status of a call that failed and goes on, but calls again at once: so the
same words are told once a second at most, by each of its two calls.
"""

from __future__ import annotations

from enum import Enum, auto

import grpc

from phalanx.clock import Clock
from phalanx.errors import InvalidInputError, PhalanxError, UnknownModelError
from phalanx.gateway.grpc.statuses import status_of
from phalanx.gateway.inference import UpstreamError

AGAIN_S = 1.0
_RETRIED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
_LASTING = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE)


class Way(Enum):
    """By which of its calls a robot is told."""

    SENDING = auto()
    POLLING = auto()


class Faults:
    """The last failure of one robot's requests, until one succeeds."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._number = 0
        self._error: PhalanxError | None = None
        self._told: dict[Way, tuple[int, str, float]] = {}

    @property
    def last(self) -> str:
        """In words; empty where the last request succeeded."""
        return "" if self._error is None else str(self._error)

    def record(self, error: PhalanxError) -> None:
        self._number += 1
        self._error = error

    def clear(self) -> None:
        self._error = None

    def take(self, way: Way) -> PhalanxError | None:
        """What is to be told by this call, if anything; then it is told."""
        if self._error is None:
            return None
        words, now_s = str(self._error), self._clock.monotonic_s()
        number, told, told_s = self._told.get(way, (0, "", 0.0))
        if number == self._number or (told == words and now_s - told_s < AGAIN_S):
            return None
        self._told[way] = (self._number, words, now_s)
        return tellable(self._error)


def tellable(error: PhalanxError) -> PhalanxError:
    """The same with a code that LeRobot's channel does not take for a reason to send again."""
    status = status_of(error)
    if status.code in _RETRIED:
        return UpstreamError(grpc.StatusCode.ABORTED, status.message)
    return error


def lasts(error: PhalanxError) -> bool:
    """Whether the same observation would fail again wherever and whenever it is sent.

    A server that is busy or whose device is out of memory may take it later, and a model that is
    not known yet may be served later.
    """
    if isinstance(error, UpstreamError):
        return error.code in _LASTING and not error.not_started
    return isinstance(error, InvalidInputError) and not isinstance(error, UnknownModelError)
