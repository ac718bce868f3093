"""What an engine asks of a replica."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Protocol

from phalanx.engine.requests import LiveRequest
from phalanx.engine.sinks import CallerSink
from phalanx.plugin import BatchingEntry, Entry
from phalanx.schema.control import ControlAnswer, ControlOp, Question
from phalanx.schema.limits import Limits
from phalanx.schema.statistics import LoopStatistics


class ReplicaExecutor(Protocol):
    """One complete replica, of one rank or of many, loaded when its executor is built."""

    @property
    def entry(self) -> Entry | BatchingEntry | None:
        """The plugin's instance, where it lives in this process."""
        ...

    @property
    def limits(self) -> Limits: ...

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes that compute it, which may compute other replicas too."""
        ...

    @property
    def loop_statistics(self) -> LoopStatistics | None:
        """The newest counters of a batching plugin; never waits."""
        ...

    def step(self, live: LiveRequest, sink: CallerSink, request: Any) -> Any:
        """Execute an accepted request and return its complete output, or raise what it ended in.

        Raises `InvalidRequestError` where it may not be called here; the request is then as it was.
        """
        ...

    def submit(self, live: LiveRequest, request: Any) -> None:
        """Queue an accepted request. Raises `InvalidRequestError` where it cannot be handed on."""
        ...

    def cancel(self, live: LiveRequest) -> bool:
        """Ask for an early end; False where that is no longer possible. Takes no lock."""
        ...

    def control(self, op: ControlOp | Question) -> Future[ControlAnswer]:
        """Apply `op` between two steps; answered when it has been applied, or refused (False).

        A question is answered with what it asks for.
        """
        ...

    def close(self) -> None:
        """End everything live, then close the plugin; any number of times, from any thread."""
        ...
