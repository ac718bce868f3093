"""Faults of an engine or of what is in front of it, as values, and the list of those that are set."""

from __future__ import annotations

import asyncio
import enum
import itertools
from collections.abc import Callable, Mapping

import msgspec

RELEASE = "/release_memory_occupation"
RESUME = "/resume_memory_occupation"
FLUSH = "/flush_cache"
TEXT_PATHS = frozenset(
    {"/generate", "/v1/chat/completions", "/chat/completions", "/v1/completions", "/infer"}
)


class FaultKind(enum.StrEnum):
    """What goes wrong with a request.

    delay            it takes `delay_s` longer
    status           it is answered with `status` (502: as by a proxy that lost its engine)
    hang             it is held until the fault is lifted, and goes on then
    drop             its connection is closed without an answer
    cut              its connection is closed after `num_bytes` of what follows the answer's head
    crash            the engine dies of it
    crash_when_busy  a release: the engine dies if it is answering requests
    crash_unmatched  a resume: the engine dies if a tag was not released here before
    slow_drain       a text request: its answer ends `delay_s` late, or (0) when the fault is
                     lifted; until then the engine is not idle, so a flush is refused

    With `after`, delay, status, hang and drop happen after the engine has done what it was asked:
    a dropped one is a lost response.
    """

    DELAY = "delay"
    STATUS = "status"
    HANG = "hang"
    DROP = "drop"
    CUT = "cut"
    CRASH = "crash"
    CRASH_WHEN_BUSY = "crash_when_busy"
    CRASH_UNMATCHED = "crash_unmatched"
    SLOW_DRAIN = "slow_drain"


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One fault, for requests of `path` (with a `*` at its end: of all that begin so).

    It happens `times` times (None: until it is lifted).
    """

    kind: FaultKind
    path: str = "*"
    times: int | None = None
    after: bool = False
    delay_s: float = 0.0
    status: int = 502
    num_bytes: int = 0

    def __post_init__(self) -> None:
        if not (self.path.startswith("/") or self.path == "*"):
            raise ValueError(f"path={self.path!r} must begin with '/', or be '*'")
        if self.times is not None and self.times < 1:
            raise ValueError(f"times={self.times} must be at least 1, or None")

    def matches(self, path: str) -> bool:
        if self.path.endswith("*"):
            return path.startswith(self.path[:-1])
        return path == self.path


def crashes_as_sglang() -> tuple[Fault, Fault]:
    """What SGLang's own scheduler dies of."""
    return (
        Fault(kind=FaultKind.CRASH_WHEN_BUSY, path=RELEASE),
        Fault(kind=FaultKind.CRASH_UNMATCHED, path=RESUME),
    )


def lost_response(path: str, *, times: int | None = 1) -> Fault:
    """The engine does it, and nobody hears of that."""
    return Fault(kind=FaultKind.DROP, path=path, times=times, after=True)


class SetFault:
    """A fault that is set: how often it may still happen, and whether it was lifted."""

    def __init__(self, fault_id: int, fault: Fault) -> None:
        self.fault_id = fault_id
        self.fault = fault
        self.num_left = fault.times
        self.lifted = asyncio.Event()


class FaultList:
    """Those that are set, in order. Belongs to one event loop."""

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._set: dict[int, SetFault] = {}

    def add(self, fault: Fault) -> int:
        """Set it; returns the id by which it is lifted."""
        fault_id = next(self._ids)
        self._set[fault_id] = SetFault(fault_id, fault)
        return fault_id

    def lift(self, fault_id: int | None = None) -> None:
        """Lift one, or all. What one of them holds goes on."""
        for one in [fault_id] if fault_id is not None else list(self._set):
            found = self._set.pop(one, None)
            if found is not None:
                found.lifted.set()

    def take(self, path: str, happens: Callable[[Fault], bool]) -> SetFault | None:
        """The first fault that is due for a request and happens, which is counted."""
        for one in self._set.values():
            if one.num_left != 0 and one.fault.matches(path) and happens(one.fault):
                if one.num_left is not None:
                    one.num_left -= 1
                return one
        return None

    def shown(self) -> Mapping[str, object]:
        return {
            str(one.fault_id): {**msgspec.to_builtins(one.fault), "num_left": one.num_left}
            for one in self._set.values()
        }
