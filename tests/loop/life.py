"""One life of a loop: requests come, go, fail and run out of room; what each must end with is known."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

from phalanx.device.cpu import CpuBackend
from phalanx.errors import RequestFailedError
from phalanx.loop.eviction import EvictionPolicy, LeastRecentlyUsed
from phalanx.loop.step_loop import StepLoop
from phalanx.schema.control import PauseMode
from phalanx.schema.events import Failed, Final
from phalanx.step.outcomes import (
    AdmitOutcome,
    AdmitRuntimeError,
    AllocationFailed,
    NotReady,
    RefusalReason,
    RequestOffloading,
)
from phalanx.testing.captured_reader import CapturedReader
from phalanx.testing.probe_resource import ProbeResource, ProbeSpec
from phalanx.testing.step_models import CacheReader, cache_reader_engine
from phalanx.testing.token_request import NODE, WALK, InjectedError, Stage, StepFault
from tests.loop.ledger import Bench
from tests.loop.surprising import due_tokens

IN_PROBE = {stage.value: stage for stage in (Stage.ADMIT, Stage.PLAN, Stage.COMMIT, Stage.PUBLISH)}


@dataclass(frozen=True)
class Surroundings:
    """The pool, the budget and the node of a life."""

    num_pages: int
    page_size: int
    tokens: int
    running: int
    batched: bool
    max_rows: int | None
    host_pages: int = 0
    eviction: EvictionPolicy = field(default_factory=LeastRecentlyUsed)
    loop: type[StepLoop] = StepLoop
    capture: str = "off"


class Refusal(enum.Enum):
    """Why an admission is refused; the value makes the reason."""

    NO_ROOM = "no room"
    TERMINAL = "terminal"
    OFFLOADING = "offloading"
    NOT_READY = "not ready"

    def reason(self, rid: str | None) -> RefusalReason:
        match self:
            case Refusal.NO_ROOM:
                return AllocationFailed("told to", 1, rid or "")
            case Refusal.TERMINAL:
                return AdmitRuntimeError("told to", rid)
            case Refusal.OFFLOADING:
                return RequestOffloading("told to", rid)
            case Refusal.NOT_READY:
                return NotReady("told to", rid)


class Saboteur:
    """The probe's reactions: the requests' own faults, and refusals that were asked for."""

    def __init__(self) -> None:
        self.bench: Bench
        self.refusals: list[Callable[[str], RefusalReason]] = []
        self.casualties: set[str] = set()
        """Requests that a neighbour's failed commit or a refusal may have ended."""

    def __call__(self, verb: str, rids: tuple[str, ...]) -> AdmitOutcome | None:
        if verb == "admit" and self.refusals:
            reason = self.refusals.pop()(rids[-1])
            # A row of a step whose forward failed is tried alone, and not again.
            alone = len(rids) == 1 or self.bench.loop.num_running == 1
            if isinstance(reason, AdmitRuntimeError) or alone:
                self.casualties.update(rids)
            return AdmitOutcome(ok=False, reason=reason)
        if verb in IN_PROBE:
            self._strike(IN_PROBE[verb], rids)
        return None

    def _strike(self, stage: Stage, rids: tuple[str, ...]) -> None:
        for rid in rids:
            try:
                self.bench.states[rid].strike(stage)
            except InjectedError:
                if stage is Stage.COMMIT:
                    self.casualties.update(rids)
                raise


def _node(around: Surroundings) -> CacheReader:
    options = {"batched": around.batched, "max_rows": around.max_rows}
    return (
        CacheReader(**options)
        if around.capture == "off"
        else CapturedReader(WALK, ("w", "v"), **options)
    )


class Life:
    """A loop on a `CacheReader` with a saboteur, and who may end how."""

    def __init__(self, around: Surroundings) -> None:
        self.saboteur = Saboteur()
        probe = ProbeSpec("probe", frozenset({NODE}), react=self.saboteur)
        node = _node(around)
        engine = cache_reader_engine(
            around.num_pages,
            around.page_size,
            node=node,
            probe=probe,
            host_pages=around.host_pages,
            max_seq_len=64,
            backend=CpuBackend(capture=around.capture),
        )
        self.bench = Bench(
            engine,
            tokens=around.tokens,
            running=around.running,
            eviction=around.eviction,
            kind=around.loop,
        )
        self.saboteur.bench = self.bench
        self.pool = around.num_pages * around.page_size
        self.faulty: set[str] = set()
        self.cancelled: set[str] = set()
        self.oversized: set[str] = set()

    def start(
        self, length: int, count: int, priority: int = 0, fault: StepFault | None = None, **options
    ) -> None:
        rid = f"r{len(self.bench.states)}"
        if length + count - 1 > self.pool:
            self.oversized.add(rid)
        if fault is not None:
            self.faulty.add(rid)
        self.bench.start(rid, length, count, priority, fault=fault, **options)

    def start_many(self, sizes: list[tuple[int, int]], fault: StepFault | None) -> None:
        """Requests that fit the pool, if only just; the last of them may have a fault."""
        for place, (length, count) in enumerate(sizes, 1):
            length = min(length, self.pool)
            count = min(count, self.pool - length + 1)
            self.start(length, count, fault=fault if place == len(sizes) else None)

    def tick(self, num_ticks: int) -> None:
        """Go on, if it was paused."""
        self.bench.loop.paused = False
        probe = self.bench.engine.resource("probe")
        assert isinstance(probe, ProbeResource)
        for _ in range(num_ticks):
            self.bench.tick()
            assert not probe.in_flight or self.bench.looks_ahead

    def cancel(self, choice: int) -> None:
        live = sorted(self.bench.ledger.live)
        if live:
            rid = live[choice % len(live)]
            self.cancelled.add(rid)
            self.bench.loop.cancel(rid)

    def pause(self, mode: PauseMode, waits: bool) -> None:
        """Pause, and go on now or at the next tick."""
        loop = self.bench.loop
        loop.paused = True
        if mode is PauseMode.RETRACT:
            loop.push_back_all()
            assert self.bench.cache.used_tokens == 0
        elif mode is PauseMode.ABORT:
            self.cancelled |= self.bench.ledger.live
            loop.cancel_all()
            assert self.bench.engine.at_rest()
        while loop.busy:
            before = loop.num_steps
            self.bench.tick()
            assert loop.num_steps == before
        loop.paused = waits

    def refuse_next(self, refusal: Refusal, *, named: bool) -> None:
        """Refuse the next admission."""
        self.saboteur.refusals.append(lambda rid: refusal.reason(rid if named else None))

    def wake(self) -> None:
        """Whatever somebody is held for has come."""
        self.bench.engine.waker.wake()

    def move_away(self, choice: int) -> None:
        """Move somebody to the host from outside."""
        live = sorted(self.bench.ledger.live)
        if live:
            self.bench.engine.residency.offload(live[choice % len(live)])

    def end(self) -> None:
        """Let everybody finish, in a bounded number of ticks, and check how each has ended."""
        bench = self.bench
        bench.loop.paused = False
        self.saboteur.refusals.clear()
        self.wake()
        # Each tick brings the first in rank on, or is one of the few that skip or end others.
        states = [bench.states[rid] for rid in bench.ledger.live]
        work = sum(len(state.prompt) + state.count + 5 for state in states)
        bench.finish(max_ticks=(1 + len(states)) * work + 5, wakes=2 * len(states))
        bench.loop.close()
        counted = sum(state.num_push_backs for state in bench.states.values())
        assert bench.loop.num_push_backs >= counted
        assert set(bench.ledger.ended) == set(bench.states)
        for rid, event in bench.ledger.ended.items():
            self._check(rid, event)

    def _check(self, rid: str, event: Final | Failed) -> None:
        state = self.bench.states[rid]
        expected = due_tokens(state)
        got = tuple(self.bench.ledger.tokens[rid])
        assert got == expected[: len(got)], f"{rid} gave {got} instead of {expected}"
        if isinstance(event, Failed):
            refused = isinstance(event.error, RequestFailedError)
            allowed = self.saboteur.casualties | (self.oversized if refused else self.faulty)
            assert rid in allowed, f"{rid} failed with {event.error!r}"
        elif event.cancelled:
            assert rid in self.cancelled
        else:
            assert got == expected
