"""Runs the rank that a launcher made this process to be.

Every rank gets the same requests in the same order from its own caller; the output rank's caller
gets the results, the others None.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from phalanx.engine.executors.base import ReplicaExecutor
from phalanx.engine.ranks import RankPlace
from phalanx.engine.requests import LiveRequest, RequestTable
from phalanx.engine.sinks import CallerSink, QuietSink
from phalanx.plugin import BatchingEntry, Entry
from phalanx.schema.control import ControlAnswer, ControlOp, Question
from phalanx.schema.limits import Limits
from phalanx.schema.statistics import LoopStatistics


class ExternalExecutor:
    """The replica of one core in this process and of its peers in others."""

    def __init__(self, core: ReplicaExecutor, place: RankPlace, requests: RequestTable) -> None:
        self._core = core
        self._place = place
        self._requests = requests

    @property
    def entry(self) -> Entry | BatchingEntry | None:
        return self._core.entry

    @property
    def limits(self) -> Limits:
        return self._core.limits

    @property
    def pids(self) -> tuple[int, ...]:
        return self._core.pids

    @property
    def loop_statistics(self) -> LoopStatistics | None:
        return self._core.loop_statistics

    def step(self, live: LiveRequest, sink: CallerSink, request: Any) -> Any:
        if self._place.is_leader:
            return self._core.step(live, sink, request)
        live.sink = QuietSink(sink)
        self._core.step(live, sink, request)
        return None

    def submit(self, live: LiveRequest, request: Any) -> None:
        if not self._place.is_leader:
            live.sink = QuietSink(live.sink)
        if self._place.world > 1:
            # Its peers will compute it, so it can no longer be taken back here.
            self._requests.claim(live)
        self._core.submit(live, request)

    def cancel(self, live: LiveRequest) -> bool:
        """Only the output rank can end a request early, and then does so on all ranks."""
        return self._place.is_leader and self._core.cancel(live)

    def control(self, op: ControlOp | Question) -> Future[ControlAnswer]:
        return self._core.control(op)

    def close(self) -> None:
        self._core.close()
