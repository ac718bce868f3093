"""Hands each request whole to one replica, and each operation to all of them.

It chooses between replicas and never addresses a rank.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

import msgspec

from phalanx.engine.boundary import run_every
from phalanx.engine.executors.base import ReplicaExecutor
from phalanx.engine.replicas import combined
from phalanx.engine.requests import LiveRequest, RequestTable
from phalanx.engine.sinks import CallerSink, Sink
from phalanx.errors import (
    EngineOverloadedError,
    InvalidRequestError,
    PhalanxError,
    RequestFailedError,
    WeightUpdateError,
)
from phalanx.plugin import BatchingEntry, Entry
from phalanx.schema.control import (
    ControlAnswer,
    ControlOp,
    JoinWeightGroup,
    LoadWeights,
    MemoryTag,
    Question,
    ReceiveWeights,
    ReplaceWeights,
    Sleep,
    Wake,
    WeightAnswer,
)
from phalanx.schema.limits import Limits
from phalanx.schema.statistics import EngineMemory, EngineStatistics, LoopStatistics

_NEW_WEIGHTS = (LoadWeights, ReplaceWeights, ReceiveWeights)
_REFUSALS = (InvalidRequestError, WeightUpdateError, EngineOverloadedError)


class RequestDispatcher:
    """The replicas of an engine. `requests` chooses one for each request as it accepts it."""

    def __init__(
        self,
        replicas: Sequence[ReplicaExecutor],
        requests: RequestTable,
        num_ranks: int = 1,
        *,
        guarded: bool = True,
    ) -> None:
        """`num_ranks` of each replica. Unless `guarded`, the replica alone decides whether it may
        fall asleep and what it takes then: other processes answer for it too, and must agree.
        """
        self._replicas = tuple(replicas)
        self._requests = requests
        self._num_ranks = num_ranks
        self._guarded = guarded
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
        if isinstance(op, Sleep) and self._guarded:
            return self._sleep(op)
        try:
            return all(self._apply(op))
        finally:
            self._settle()

    def ask(self, question: Question) -> tuple[WeightAnswer, ...]:
        """The answer of each replica."""
        answers = self._apply(question)
        return tuple([answer for answer in answers if not isinstance(answer, bool)])

    def memory(self) -> EngineMemory:
        """Which tags are asleep on some replica; without the bytes that are resident."""
        loop = self._loop
        return EngineMemory(asleep=loop.asleep, waiting_for_weights=loop.waiting_for_weights)

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes that compute the replicas."""
        return tuple({pid for replica in self._replicas for pid in replica.pids})

    def statistics(self) -> EngineStatistics:
        return self._requests.statistics([replica.loop_statistics for replica in self._replicas])

    def close(self) -> None:
        """Close the replicas, the last one first."""
        run_every([partial(replica.close) for replica in reversed(self._replicas)])

    def _sleep(self, op: Sleep) -> bool:
        """All replicas fall asleep or none does, and no request slips in meanwhile."""
        before = self.memory()
        computes = before.ready and not self._loop.paused
        repeated = op.tags <= before.asleep
        if not self._requests.begin_sleep(only_idle=computes and not repeated):
            return False
        try:
            told: frozenset[MemoryTag] = frozenset()
            for tags in _in_order(op.tags) if len(self._replicas) > 1 else [op.tags]:
                applied = self._apply(Sleep(tags))
                if not all(applied):
                    if told or any(applied):
                        self._apply(Wake((told | tags) - before.asleep))
                    return False
                told |= tags
            return True
        finally:
            self._settle()
            self._requests.end_sleep()

    def _apply(self, op: ControlOp | Question) -> list[ControlAnswer]:
        """What every replica answers, when the last one has; the first error of one is raised.

        `RequestFailedError` where some have new weights then and others have not.
        """
        with self._control_lock:  # so that all replicas get operations in the same order
            answers = [
                _asked(replica, _for_replica(op, index, self._num_ranks))
                for index, replica in enumerate(self._replicas)
            ]
        wait(answers)
        if isinstance(op, _NEW_WEIGHTS):
            _check_together(answers)
        return [answer.result() for answer in answers]

    def _settle(self) -> None:
        if self._guarded:
            self._requests.settle(self.memory)

    @property
    def _loop(self) -> LoopStatistics:
        loop = combined([replica.loop_statistics for replica in self._replicas])
        return LoopStatistics() if loop is None else loop


def _asked(replica: ReplicaExecutor, op: ControlOp | Question) -> Future[ControlAnswer]:
    """The answer to come of one replica, which may also refuse at once: others were asked already."""
    try:
        return replica.control(op)
    except PhalanxError as error:
        refused: Future[ControlAnswer] = Future()
        refused.set_exception(error)
        return refused


def _check_together(answers: Sequence[Future[ControlAnswer]]) -> None:
    errors = [answer.exception() for answer in answers]
    refused = [error for error in errors if isinstance(error, _REFUSALS)]
    if refused and None in errors:
        raise RequestFailedError(
            f"{errors.count(None)} of {len(errors)} replicas have the new weights and the others "
            f"have the old ones; send them again, to all: {refused[0]}"
        ) from refused[0]


def _in_order(tags: frozenset[MemoryTag]) -> list[frozenset[MemoryTag]]:
    """What replicas give up one after the other. What one of them may refuse is first: a wake brings
    a cache back to those that did not, and not a trainer's weights.
    """
    first = tags & {MemoryTag.KV_CACHE}
    return [part for part in (first, tags - first) if part] or [tags]


def _for_replica(op: ControlOp | Question, index: int, num_ranks: int) -> ControlOp | Question:
    """`op` as replica `index` gets it: each has ranks of its own in a group with a trainer."""
    if not isinstance(op, JoinWeightGroup):
        return op
    return msgspec.structs.replace(op, rank_offset=op.rank_offset + index * num_ranks)
