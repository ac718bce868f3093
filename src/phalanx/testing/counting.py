"""A `BatchingEntry` that counts: each tick, every running request yields its next number."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from phalanx.engine_config import EntryArgs
from phalanx.errors import InvalidRequestError
from phalanx.plugin import BatchingEntry, Delta, Event, Failed, Final, Scheduled
from phalanx.schema.control import (
    Continue,
    ControlOp,
    Flush,
    MemoryTag,
    Pause,
    PauseMode,
    SetWeightVersion,
    Sleep,
    Wake,
)
from phalanx.schema.limits import Limits
from phalanx.schema.statistics import EngineMemory, LoopStatistics


class Fault(enum.Enum):
    """What a request makes the plugin do wrong.

    `FAIL` ends the request in an error of its own at its first tick; the others raise out of the
    method they name, which breaks the replica.
    """

    FAIL = "fail"
    RAISE_IN_START = "start"
    RAISE_IN_TICK = "tick"
    RAISE_IN_CANCEL = "cancel"


@dataclass(frozen=True)
class CountingArgs(EntryArgs):
    """`max_count` bounds a request; `max_batch_size` requests run at once, others wait.

    `before_tick` runs first in each tick, in the loop's thread, where a test can wait or observe.
    `fail_setup` and `fail_close` raise there.
    """

    max_count: int = 1000
    max_batch_size: int = 8
    before_tick: Callable[[], None] | None = None
    fail_setup: bool = False
    fail_close: bool = False


class CountRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Count from 0 to `count`, exclusive."""

    count: int
    fault: Fault | None = None


class CountDelta(msgspec.Struct, frozen=True):
    """Consecutive numbers."""

    numbers: tuple[int, ...]

    def merged(self, later: CountDelta) -> CountDelta | None:
        return CountDelta(self.numbers + later.numbers)


class CountOutput(msgspec.Struct, frozen=True):
    """All numbers; fewer than asked for where the request was cancelled."""

    numbers: tuple[int, ...]


class CountingError(RuntimeError):
    """What the faults raise."""


@dataclass
class _Count:
    request: CountRequest
    scheduled: bool = False
    done: int = 0

    def output(self) -> CountOutput:
        return CountOutput(tuple(range(self.done)))


@dataclass
class _State:
    running: dict[str, _Count] = field(default_factory=dict)
    cancelled: list[str] = field(default_factory=list)
    paused: bool = False
    asleep: frozenset[MemoryTag] = frozenset()
    refused: list[str] = field(default_factory=list)
    num_steps: int = 0
    num_generated: int = 0
    last_batch_size: int = 0


class Counting(BatchingEntry):
    """Serves its oldest `max_batch_size` requests at once."""

    name = "counting"
    args_cls = CountingArgs
    request_cls = CountRequest
    output_cls = CountOutput

    @staticmethod
    def validate(request: CountRequest, limits: Limits) -> None:
        bound = limits.context_length
        if request.count < 0 or (bound is not None and request.count > bound):
            raise InvalidRequestError(
                f"count={request.count} must be from 0 to {bound}", field="count"
            )

    def setup(self, args: CountingArgs) -> None:
        if args.fail_setup:
            raise CountingError("setup fails as it was told to")
        self._args = args
        self._state = _State()
        self.num_closes = 0

    @property
    def limits(self) -> Limits:
        return Limits(context_length=self._args.max_count, max_batch_size=self._args.max_batch_size)

    def start(self, rid: str, request: CountRequest) -> None:
        if request.fault is Fault.RAISE_IN_START:
            raise CountingError("start fails as it was told to")
        if rid in self._state.running:
            raise CountingError(f"request {rid!r} is live already")
        if self._state.asleep:
            self._state.refused.append(rid)
            return
        self._state.running[rid] = _Count(request)

    def cancel(self, rid: str) -> None:
        count = self._state.running.get(rid)
        if count is None or rid in self._state.cancelled:
            return
        if count.request.fault is Fault.RAISE_IN_CANCEL:
            raise CountingError("cancel fails as it was told to")
        self._state.cancelled.append(rid)

    def tick(self) -> list[Event]:
        if self._args.before_tick is not None:
            self._args.before_tick()
        state = self._state
        events: list[Event] = []
        for rid in state.cancelled:
            events.append(Final(rid, state.running.pop(rid).output(), cancelled=True))
        state.cancelled.clear()
        memory = EngineMemory(asleep=state.asleep)
        events += [Failed(rid, memory.refusal()) for rid in state.refused]
        state.refused.clear()
        if not (state.paused or state.asleep) and state.running:
            batch = list(state.running.items())[: self._args.max_batch_size]
            state.num_steps += 1
            state.last_batch_size = len(batch)
            for rid, count in batch:
                events.extend(self._advance(rid, count))
        return events

    def _advance(self, rid: str, count: _Count) -> list[Event]:
        state = self._state
        if count.request.fault is Fault.RAISE_IN_TICK:
            raise CountingError("tick fails as it was told to")
        events: list[Event] = []
        if not count.scheduled:
            count.scheduled = True
            events.append(Scheduled(rid))
        if count.request.fault is Fault.FAIL:
            del state.running[rid]
            return [*events, Failed(rid, CountingError(f"request {rid!r} fails as it was told to"))]
        if count.done < count.request.count:
            events.append(Delta(rid, CountDelta((count.done,))))
            count.done += 1
            state.num_generated += 1
        if count.done == count.request.count:
            del state.running[rid]
            events.append(Final(rid, count.output()))
        return events

    @property
    def busy(self) -> bool:
        state = self._state
        computes = bool(state.running) and not (state.paused or state.asleep)
        return bool(state.cancelled or state.refused) or computes

    def control(self, op: ControlOp) -> bool:
        state = self._state
        match op:
            case Pause(mode=mode):
                state.paused = True
                if mode is PauseMode.ABORT:
                    state.cancelled = list(state.running)
                return True
            case Continue():
                state.paused = False
                return True
            case Flush():
                return not state.running
            case Sleep(tags=tags):
                fresh = tags - state.asleep
                if fresh and state.running and not (state.paused or state.asleep):
                    return False
                state.asleep |= fresh
                return True
            case Wake(tags=tags):
                state.asleep -= tags
                return True
            case SetWeightVersion():
                return True
            case _:
                raise NotImplementedError(f"plugin 'counting' does not do {type(op).__name__}")

    def statistics(self) -> LoopStatistics:
        state = self._state
        num_running = min(len(state.running), self._args.max_batch_size)
        return LoopStatistics(
            num_running=num_running,
            num_waiting=len(state.running) - num_running,
            num_steps=state.num_steps,
            num_generated_tokens=state.num_generated,
            last_batch_size=state.last_batch_size,
            paused=state.paused,
            asleep=state.asleep,
        )

    def close(self) -> None:
        self.num_closes += 1
        if self._args.fail_close:
            raise CountingError("close fails as it was told to")
