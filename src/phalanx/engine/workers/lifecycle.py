"""The life of a group of workers, as a table of the only moves there are."""

from __future__ import annotations

import enum
import threading
from collections.abc import Mapping

from phalanx.errors import EngineUnavailableError


class LifecycleState(enum.StrEnum):
    """What a group of workers is doing; it is started once and ends stopped or failed."""

    CREATED = "created"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"

    @property
    def healthy(self) -> bool:
        """Whether requests may be routed here; a group not yet started is, as it starts lazily."""
        return self in _HEALTHY

    @property
    def ended(self) -> bool:
        return not TRANSITIONS[self]


TRANSITIONS: Mapping[LifecycleState, frozenset[LifecycleState]] = {
    LifecycleState.CREATED: frozenset({LifecycleState.STARTING, LifecycleState.STOPPED}),
    LifecycleState.STARTING: frozenset(
        {LifecycleState.RUNNING, LifecycleState.STOPPING, LifecycleState.FAILED}
    ),
    LifecycleState.RUNNING: frozenset({LifecycleState.STOPPING, LifecycleState.FAILED}),
    LifecycleState.STOPPING: frozenset({LifecycleState.STOPPED, LifecycleState.FAILED}),
    LifecycleState.STOPPED: frozenset(),
    LifecycleState.FAILED: frozenset(),
}

_HEALTHY = frozenset({LifecycleState.CREATED, LifecycleState.STARTING, LifecycleState.RUNNING})


class Lifecycle:
    """The state of one group; of several threads that want to move it, the first one does."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._state = LifecycleState.CREATED
        self._failure: EngineUnavailableError | None = None

    @property
    def state(self) -> LifecycleState:
        return self._state

    @property
    def failure(self) -> EngineUnavailableError | None:
        """Why the state is FAILED."""
        return self._failure

    def move(self, to: LifecycleState, *, since: LifecycleState | None = None) -> bool:
        """Take one step of the table, from `since` only where it is given; False if there is none."""
        assert to is not LifecycleState.FAILED, "use fail, which says why"
        with self._lock:
            if since is not None and self._state is not since:
                return False
            if to not in TRANSITIONS[self._state]:
                return False
            self._state = to
            return True

    def fail(
        self, failure: EngineUnavailableError, *, since: LifecycleState | None = None
    ) -> LifecycleState | None:
        """As `move` to FAILED; returns the state before, or None where it was not moved."""
        with self._lock:
            before = self._state
            if since is not None and before is not since:
                return None
            if LifecycleState.FAILED not in TRANSITIONS[before]:
                return None
            # First, so that whoever sees FAILED finds the reason.
            self._failure = failure
            self._state = LifecycleState.FAILED
            return before

    def unavailable(self) -> EngineUnavailableError:
        """Why nothing can be sent now; a fresh exception, since each caller raises its own."""
        failure = self._failure
        if failure is not None:
            error = EngineUnavailableError(str(failure))
            error.__cause__ = failure.__cause__
            return error
        reasons = {
            LifecycleState.CREATED: "its workers have not been started",
            LifecycleState.STARTING: "its workers are still starting",
            LifecycleState.STOPPING: "it is being closed",
            LifecycleState.STOPPED: "it is closed",
        }
        return EngineUnavailableError(
            f"the engine cannot serve: {reasons.get(self._state, self._state)}"
        )
