"""Replicas that are started and not published yet, as the event log tells of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from phalanx.roles.events import EventKind, EventLog, RoleEvent
from phalanx.routing.roles.snapshot import ReplicaState
from phalanx.wire.discovery import InternalEngineEntry


@dataclass(frozen=True)
class UnpublishedReplica:
    """One of them. `since_wall_s` is when it was started, `detail` what it does, if it says so."""

    model: str
    engine_id: str
    state: ReplicaState
    generation: int
    since_wall_s: float
    detail: str = ""


class Progress:
    """Reads `events` whenever it is asked."""

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self._read = 0
        self._replicas: dict[tuple[str, str], UnpublishedReplica] = {}

    def of(
        self, role: str, published: Iterable[InternalEngineEntry]
    ) -> tuple[UnpublishedReplica, ...]:
        """Those of a role that has published these engines: also one that is to take the place of
        a dead one.
        """
        for event in self._events.after(self._read):
            self._read = event.number
            self._take(event)
        for engine in published:
            found = self._replicas.get((role, engine.engine_id))
            if found is not None and not _follows(found, engine):
                del self._replicas[role, engine.engine_id]
        return tuple(each for (owner, _), each in self._replicas.items() if owner == role)

    def _take(self, event: RoleEvent) -> None:
        key = event.role, event.engine_id
        if event.kind is EventKind.GENERATION:
            self._replicas[key] = UnpublishedReplica(
                event.model, event.engine_id, ReplicaState.STARTING, int(event.detail), event.wall_s
            )
        elif key in self._replicas and event.kind is EventKind.STATE:
            state, _, detail = event.detail.partition(": ")
            self._replicas[key] = replace(
                self._replicas[key], state=ReplicaState(state), detail=detail
            )
        elif key in self._replicas and event.kind is EventKind.WAITING:
            self._replicas[key] = replace(self._replicas[key], detail=f"waiting {event.detail}")


def _follows(coming: UnpublishedReplica, published: InternalEngineEntry) -> bool:
    """Whether it is on its way to the place of the published one, which has died."""
    return (
        published.state == ReplicaState.DEAD
        and coming.state is not ReplicaState.DEAD
        and coming.generation > published.generation
    )
