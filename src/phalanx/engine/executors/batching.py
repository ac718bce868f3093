"""Runs a `BatchingEntry` in this process, on a loop thread of its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from phalanx.clock import Clock
from phalanx.engine.boundary import Raised, attempt
from phalanx.engine.core import EngineCore
from phalanx.engine.executors.loop_thread import LoopThread
from phalanx.engine.executors.waiting import submit_and_wait
from phalanx.engine.lockstep.messages import Cancel, Start
from phalanx.engine.lockstep.turns import create_turns
from phalanx.engine.ranks import Rank
from phalanx.engine.requests import LiveRequest, RequestTable
from phalanx.engine.sinks import CallerSink
from phalanx.engine_config import EntryArgs
from phalanx.errors import InvalidRequestError
from phalanx.plugin import BatchingEntry
from phalanx.schema.control import ControlAnswer, ControlOp, Question
from phalanx.schema.limits import Limits
from phalanx.schema.statistics import LoopStatistics


class BatchingExecutor:
    """A rank of a `BatchingEntry` in this process."""

    def __init__(
        self,
        plugin: type[BatchingEntry],
        plugin_args: EntryArgs,
        rank: Rank,
        requests: RequestTable,
        clock: Clock,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> None:
        self._requests = requests
        load = partial(EngineCore[BatchingEntry], plugin, plugin_args, rank.config, clock)
        turns = create_turns(rank, requests)
        loop = attempt(partial(LoopThread, load, rank, turns, requests, on_failure))
        if isinstance(loop, Raised):
            turns.close()
            raise loop.error
        self._loop = loop

    @property
    def entry(self) -> BatchingEntry:
        return self._loop.core.entry

    @property
    def limits(self) -> Limits:
        return self._loop.core.limits

    @property
    def pids(self) -> tuple[int, ...]:
        return (os.getpid(),)

    @property
    def loop_statistics(self) -> LoopStatistics | None:
        return self._loop.statistics

    def step(self, live: LiveRequest, sink: CallerSink, request: Any) -> Any:
        self._refuse_on_loop_thread("step")
        return submit_and_wait(self, live, sink, request)

    def submit(self, live: LiveRequest, request: Any) -> None:
        self._loop.post(Start(live, request))

    def cancel(self, live: LiveRequest) -> bool:
        if not live.cancelled:
            live.cancelled = True
            self._loop.post(Cancel(live))
        return True

    def control(self, op: ControlOp | Question) -> Future[ControlAnswer]:
        self._refuse_on_loop_thread("control")
        return self._loop.control(op)

    def close(self) -> None:
        self._loop.close()

    def _refuse_on_loop_thread(self, verb: str) -> None:
        if self._loop.is_current:
            raise InvalidRequestError(
                f"{verb}() waits for the engine's loop and was called on its thread, in a "
                "future's callback or in the plugin; call it from another thread"
            )
