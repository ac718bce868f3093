"""A loop that looks ahead on threads of its own, as for a device that computes beside the host."""

from __future__ import annotations

from phalanx.loop.driving.threads import StepThreads
from phalanx.loop.eviction import EvictionPolicy, LeastRecentlyUsed
from phalanx.loop.pipelined_loop import MAX_CONSECUTIVE_AHEAD, PipelinedLoop
from phalanx.loop.scheduler import Budget
from phalanx.step.engine import StepEngine

_LRU = LeastRecentlyUsed()


class ThreadedLoop(PipelinedLoop):
    """See the module."""

    def __init__(
        self,
        engine: StepEngine,
        budget: Budget,
        eviction: EvictionPolicy = _LRU,
        max_consecutive: int = MAX_CONSECUTIVE_AHEAD,
    ) -> None:
        super().__init__(engine, budget, eviction, max_consecutive, StepThreads(engine))
