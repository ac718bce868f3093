"""What happened to the roles of a job, the newest of it kept, for the dashboard and for operators."""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from dataclasses import dataclass

from phalanx.clock import Clock

MAX_EVENTS = 1000


class EventKind(enum.StrEnum):
    """`operation` and `failed`: an operation began, or did not end well. `state`: a replica moved.

    `generation`: a replica is started, anew after the first time. `published`: a new revision.
    `weights`: a version arrived at a replica. `waiting`: a replica waits for the trainer's weights,
    or until requests end.
    `blocked` and `unblocked`: nobody is certain what a replica holds, or somebody is again.
    `phase`: the job was asked for another phase, or is in it. `lease`: who has devices by turns.
    """

    OPERATION = "operation"
    FAILED = "failed"
    STATE = "state"
    GENERATION = "generation"
    PUBLISHED = "published"
    WEIGHTS = "weights"
    WAITING = "waiting"
    BLOCKED = "blocked"
    UNBLOCKED = "unblocked"
    PHASE = "phase"
    LEASE = "lease"


@dataclass(frozen=True)
class RoleEvent:
    """One event. Numbers grow by one through the life of the log; `model` and `engine_id` are empty
    where it concerns all of them.
    """

    number: int
    wall_s: float
    role: str
    kind: EventKind
    model: str = ""
    engine_id: str = ""
    detail: str = ""


class EventLog:
    """A ring of the newest events, shared by the managers of one event loop."""

    def __init__(self, clock: Clock, capacity: int = MAX_EVENTS) -> None:
        self._clock = clock
        self._events: deque[RoleEvent] = deque(maxlen=capacity)
        self._number = 0
        self._changed = asyncio.Event()

    @property
    def last_number(self) -> int:
        return self._number

    def add(
        self,
        role: str,
        kind: EventKind,
        *,
        model: str = "",
        engine_id: str = "",
        detail: str = "",
    ) -> None:
        self._number += 1
        event = RoleEvent(self._number, self._clock.wall_s(), role, kind, model, engine_id, detail)
        self._events.append(event)
        # Whoever waits holds the old one; the next to wait gets a new one.
        self._changed.set()
        self._changed = asyncio.Event()

    def after(self, number: int) -> tuple[RoleEvent, ...]:
        """Those with greater numbers that are still kept, oldest first."""
        return tuple(event for event in self._events if event.number > number)

    async def wait(self, number: int, timeout_s: float) -> tuple[RoleEvent, ...]:
        """As `after`, once there is one; nothing after `timeout_s` without."""
        try:
            async with asyncio.timeout(timeout_s):
                while number >= self._number:
                    await self._changed.wait()
        except TimeoutError:
            pass
        return self.after(number)
