"""Runs a `BatchingEntry` in this process, on a loop thread of its own."""

from __future__ import annotations

from functools import partial
from typing import Any

from phalanx.clock import Clock
from phalanx.engine.core import EngineCore
from phalanx.engine.executors.loop_thread import Cancel, LoopThread, Start
from phalanx.engine.requests import LiveRequest, RequestTable
from phalanx.engine.sinks import CallerSink
from phalanx.engine_config import EngineConfig, EntryArgs
from phalanx.errors import InvalidRequestError
from phalanx.plugin import BatchingEntry
from phalanx.schema.control import ControlOp
from phalanx.schema.limits import Limits
from phalanx.schema.statistics import LoopStatistics


class BatchingExecutor:
    """The inline replica of a `BatchingEntry`."""

    def __init__(
        self,
        plugin: type[BatchingEntry],
        plugin_args: EntryArgs,
        config: EngineConfig,
        requests: RequestTable,
        clock: Clock,
    ) -> None:
        self._requests = requests
        load = partial(EngineCore[BatchingEntry], plugin, plugin_args, config, clock)
        self._loop = LoopThread(load, config, requests)

    @property
    def entry(self) -> BatchingEntry:
        return self._loop.core.entry

    @property
    def limits(self) -> Limits:
        return self._loop.core.limits

    @property
    def loop_statistics(self) -> LoopStatistics | None:
        return self._loop.statistics

    def step(self, rid: str, request: Any) -> Any:
        self._refuse_on_loop_thread("step")
        sink = CallerSink()
        live = self._requests.accept(rid, sink)
        try:
            self.submit(live, request)
            return sink.future.result()
        finally:
            if not sink.future.done():  # interrupted
                self.cancel(live)

    def submit(self, live: LiveRequest, request: Any) -> None:
        self._loop.post(Start(live, request))

    def cancel(self, live: LiveRequest) -> bool:
        if not live.cancelled:
            live.cancelled = True
            self._loop.post(Cancel(live))
        return True

    def control(self, op: ControlOp) -> bool:
        self._refuse_on_loop_thread("control")
        return self._loop.control(op).result()

    def close(self) -> None:
        self._loop.close()

    def _refuse_on_loop_thread(self, verb: str) -> None:
        if self._loop.is_current:
            raise InvalidRequestError(
                f"{verb}() waits for the engine's loop and was called on its thread, in a "
                "future's callback or in the plugin; call it from another thread"
            )
