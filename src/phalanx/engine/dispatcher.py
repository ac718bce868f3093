"""Hands each request whole to one replica, and each operation to all of them.

It chooses between replicas and never addresses a rank.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

from phalanx.engine.boundary import run_every
from phalanx.engine.executors.base import ReplicaExecutor
from phalanx.engine.requests import LiveRequest, RequestTable
from phalanx.engine.sinks import CallerSink, Sink
from phalanx.errors import EngineOverloadedError, InvalidRequestError
from phalanx.plugin import BatchingEntry, Entry
from phalanx.schema.control import ControlOp
from phalanx.schema.limits import Limits
from phalanx.schema.statistics import EngineStatistics


class RequestDispatcher:
    """The replicas of an engine. `requests` chooses one for each request as it accepts it."""

    def __init__(self, replicas: Sequence[ReplicaExecutor], requests: RequestTable) -> None:
        self._replicas = tuple(replicas)
        self._requests = requests
        self._control_lock = threading.Lock()

    @property
    def limits(self) -> Limits:
        """Bounds on requests; the same for all replicas, which load the same model."""
        return self._replicas[0].limits

    @property
    def entry(self) -> Entry | BatchingEntry | None:
        """The plugin's instance, where there is one in this process."""
        return self._replicas[0].entry

    def step(self, rid: str, request: Any, sink: CallerSink) -> Any:
        """Execute a request while its caller waits."""
        live = self._requests.accept(rid, sink)
        try:
            return self._replicas[live.account.replica].step(live, sink, request)
        except (InvalidRequestError, EngineOverloadedError):
            self._requests.reject(live)  # unless it has ended, in an error of the plugin's own
            raise

    def submit(self, rid: str, request: Any, sink: Sink) -> LiveRequest:
        """Queue a request; its outcome goes to `sink`. Raises where it was never started."""
        live = self._requests.accept(rid, sink)
        try:
            self._replicas[live.account.replica].submit(live, request)
        except BaseException:  # it was refused, or its caller interrupted
            self._requests.reject(live)
            raise
        return live

    def cancel(self, live: LiveRequest) -> bool:
        """End a request early; False where that is no longer possible."""
        return self._replicas[live.account.replica].cancel(live)

    def control(self, op: ControlOp) -> bool:
        """Apply `op` on every replica; False where one of them refused it."""
        with self._control_lock:  # so that all replicas get operations in the same order
            answers = [replica.control(op) for replica in self._replicas]
        return all([answer.result() for answer in answers])

    def statistics(self) -> EngineStatistics:
        return self._requests.statistics([replica.loop_statistics for replica in self._replicas])

    def close(self) -> None:
        """Close the replicas, the last one first."""
        run_every([partial(replica.close) for replica in reversed(self._replicas)])
