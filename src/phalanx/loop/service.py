"""A loaded model and its loop, as an entry hands its calls to it: what is the same for all models.

While memory is given back, or weights have yet to come, requests are refused and nothing is computed.
"""

from __future__ import annotations

from typing import ClassVar

from phalanx.loop.model_memory import ModelMemory
from phalanx.loop.request import RequestState
from phalanx.loop.step_loop import StepLoop
from phalanx.schema.control import (
    Continue,
    ControlOp,
    Flush,
    Pause,
    PauseMode,
    SetWeightVersion,
    Sleep,
    Wake,
)
from phalanx.schema.limits import Limits
from phalanx.schema.statistics import LoopStatistics
from phalanx.step.engine import StepEngine


class LoopService:
    """See the module. Called by one thread.

    `kind` is what the model is called where an operation is refused, and `instead` what to do then.
    """

    kind: ClassVar[str] = "this model"
    instead: ClassVar[str] = "load another checkpoint instead"

    def __init__(
        self, engine: StepEngine, loop: StepLoop, memory: ModelMemory, limits: Limits
    ) -> None:
        self.limits = limits
        self._engine = engine
        self._loop = loop
        self._memory = memory
        self._paused = False

    @property
    def busy(self) -> bool:
        return self._loop.busy

    def begin(self, rid: str, state: RequestState) -> None:
        """Queue a request, which ends at once while the model is not ready."""
        self._loop.start(rid, state)
        memory = self._memory.state
        if not memory.ready:
            self._loop.fail(rid, memory.refusal())

    def cancel(self, rid: str) -> None:
        self._loop.cancel(rid)

    def control(self, op: ControlOp) -> bool:
        """Apply an operation. Raises as `BatchingEntry.control`."""
        match op:
            case Pause(mode):
                self._paused = self._loop.paused = True
                if mode is PauseMode.ABORT:
                    self.cancel_all()
                elif mode is PauseMode.RETRACT:
                    self._loop.push_back_all()
                return True
            case Continue():
                self._paused = False
                self._compute_or_wait()
                return True
            case Flush():
                # What is held for another engine belongs to a request that is not over. While paused,
                # requests that have nothing of the cache wait for what comes after the flush.
                if not (self._at_rest() and self._engine.at_rest()):
                    return False
                self._engine.prefixes.forget()
                return True
            case _:
                at_rest = self._at_rest()
                try:
                    return self.operate(op, at_rest=at_rest)
                finally:
                    self._compute_or_wait()

    def operate(self, op: ControlOp, *, at_rest: bool) -> bool:
        """Apply an operation on memory or weights; `at_rest`: no request is live, or all are paused.

        Raises `NotImplementedError` for one that the model does not do.
        """
        match op:
            case Sleep(tags):
                return self._memory.sleep(tags, at_rest=at_rest)
            case Wake(tags):
                self._memory.wake(tags)
                return True
            case SetWeightVersion():
                return True
            case _:
                raise NotImplementedError(
                    f"{self.kind} does not do {type(op).__name__}; {self.instead}"
                )

    def cancel_all(self) -> None:
        """End every live request."""
        self._loop.cancel_all()

    @property
    def idle(self) -> bool:
        """Whether no request is live, once what is computed now has been accounted for."""
        self._loop.land()
        return self._loop.idle

    def statistics(self) -> LoopStatistics:
        """What the loop counts; a model adds its own."""
        loop, memory = self._loop, self._memory.state
        return LoopStatistics(
            num_running=loop.num_running,
            num_waiting=loop.num_waiting,
            num_steps=loop.num_steps,
            num_ahead=loop.num_ahead,
            num_discarded=loop.num_discarded,
            num_retractions=loop.num_push_backs,
            num_offloads=loop.num_offloads,
            num_reloads=loop.num_reloads,
            num_offloaded=loop.num_offloaded,
            last_batch_size=loop.last_batch_size,
            pool_tokens=self.limits.pool_tokens or 0,
            paused=self._paused,
            asleep=memory.asleep,
            waiting_for_weights=memory.waiting_for_weights,
            stage_s=self._engine.stage_s(),
        )

    def close(self) -> None:
        self.cancel_all()
        self._loop.close()
        self._engine.shutdown()
        self._memory.close()

    def _at_rest(self) -> bool:
        return self.idle or self._paused

    def _compute_or_wait(self) -> None:
        self._loop.paused = self._paused or not self._memory.state.ready
