"""Random lives of a loop: whatever arrives, leaves, pauses, fails or runs out of room, every request
ends once with what it gives alone, and in the end everything is as at the start."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from phalanx.errors import RequestFailedError
from phalanx.schema.control import PauseMode
from phalanx.schema.events import Failed, Final
from phalanx.step.outcomes import AdmitOutcome, AdmitRuntimeError, AllocationFailed
from phalanx.testing.probe_resource import ProbeSpec
from phalanx.testing.step_models import CacheReader, cache_reader_engine, expected_tokens
from phalanx.testing.token_request import NODE, InjectedError, Stage, StepFault
from tests.loop.ledger import Bench

IN_PROBE = {stage.value: stage for stage in (Stage.ADMIT, Stage.PLAN, Stage.COMMIT, Stage.PUBLISH)}
FAULTS = st.builds(StepFault, st.sampled_from(Stage), st.integers(0, 3))


class Saboteur:
    """The probe's reactions: the requests' own faults, and refusals that a rule has asked for."""

    def __init__(self) -> None:
        self.bench: Bench
        self.refusals: list[Callable[[str], AllocationFailed | AdmitRuntimeError]] = []
        self.casualties: set[str] = set()
        """Requests that a neighbour's fault or a refusal may have ended."""

    def __call__(self, verb: str, rids: tuple[str, ...]) -> AdmitOutcome | None:
        if verb == "admit" and self.refusals:
            reason = self.refusals.pop()(rids[-1])
            if isinstance(reason, AdmitRuntimeError):
                self.casualties.update(rids)
            elif self.bench.loop.num_running == 1:
                self.casualties.update(rids)
            return AdmitOutcome(ok=False, reason=reason)
        if verb in IN_PROBE:
            self._strike(IN_PROBE[verb], rids)
        return None

    def _strike(self, stage: Stage, rids: tuple[str, ...]) -> None:
        for rid in rids:
            state = self.bench.states.get(rid)
            if state is None:
                continue
            try:
                state.strike(stage)
            except InjectedError:
                if stage is Stage.COMMIT:
                    self.casualties.update(rids)
                raise


class LoopMachine(RuleBasedStateMachine):
    @initialize(
        num_pages=st.integers(2, 8),
        page_size=st.integers(1, 4),
        tokens=st.sampled_from([64, 8, 3, 2, 1]),
        running=st.sampled_from([6, 3, 2, 1]),
        batched=st.sampled_from([True, True, False]),
        max_rows=st.sampled_from([None, None, 3, 2, 1]),
    )
    def build(self, num_pages, page_size, tokens, running, batched, max_rows):
        self.saboteur = Saboteur()
        probe = ProbeSpec("probe", frozenset({NODE}), react=self.saboteur)
        node = CacheReader(batched=batched, max_rows=max_rows)
        engine = cache_reader_engine(num_pages, page_size, node=node, probe=probe)
        self.bench = self.saboteur.bench = Bench(engine, tokens=tokens, running=running)
        self.pool = num_pages * page_size
        self.faulty: set[str] = set()
        self.cancelled: set[str] = set()
        self.oversized: set[str] = set()

    @rule(
        length=st.integers(1, 12),
        count=st.integers(0, 7),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
        walk=st.sampled_from(["w", "w", "w", "v"]),
        skips=st.sampled_from([0, 0, 0, 0, 2]),
        indivisible=st.sampled_from([False, False, False, True]),
        fault=st.one_of(st.none(), FAULTS),
    )
    def start_one(self, length, count, priority, walk, skips, indivisible, fault):
        self.start(length, count, priority, walk, skips, indivisible, fault)

    def start(self, length, count, priority, walk, skips, indivisible, fault):
        rid = f"r{len(self.bench.states)}"
        if length + count - 1 > self.pool:
            self.oversized.add(rid)
        if fault is not None:
            self.faulty.add(rid)
        options = {"fault": fault, "skips": skips, "indivisible": indivisible}
        self.bench.start(rid, length, count, priority, place=(NODE, walk), **options)

    @rule(
        sizes=st.lists(st.tuples(st.integers(1, 8), st.integers(1, 7)), min_size=2, max_size=6),
        fault=st.one_of(st.none(), FAULTS),
    )
    def start_many(self, sizes, fault):
        """Requests that fit the pool, if only just; the last of them may have a fault."""
        for place, (length, count) in enumerate(sizes, 1):
            length = min(length, self.pool)
            count = min(count, self.pool - length + 1)
            last = fault if place == len(sizes) else None
            self.start(length, count, 0, "w", 0, False, last)

    @rule(ticks=st.integers(1, 6))
    def tick(self, ticks):
        self.bench.loop.paused = False
        for _ in range(ticks):
            self.bench.tick()

    @precondition(lambda self: self.bench.ledger.live)
    @rule(choice=st.integers(0, 10**6))
    def cancel(self, choice):
        live = sorted(self.bench.ledger.live)
        rid = live[choice % len(live)]
        self.cancelled.add(rid)
        self.bench.loop.cancel(rid)

    @rule(mode=st.sampled_from(PauseMode), waits=st.booleans())
    def pause(self, mode, waits):
        """Pause, and go on now or at some later tick."""
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

    @rule(terminal=st.booleans(), named=st.booleans())
    def refuse_next(self, terminal, named):
        def reason(rid: str):
            if terminal:
                return AdmitRuntimeError("told to", rid if named else None)
            return AllocationFailed("told to", 1, rid if named else "")

        self.saboteur.refusals.append(reason)

    @invariant()
    def push_backs_are_counted(self):
        if hasattr(self, "bench"):
            counted = sum(state.num_push_backs for state in self.bench.states.values())
            assert self.bench.loop.num_push_backs >= counted

    def teardown(self):
        if not hasattr(self, "bench"):
            return
        self.bench.loop.paused = False
        self.saboteur.refusals.clear()
        # Each tick brings the first in rank on, or is one of the few that skip or end others.
        states = [self.bench.states[rid] for rid in self.bench.ledger.live]
        work = sum(len(state.prompt) + state.count + 5 for state in states)
        self.bench.finish(max_ticks=(1 + len(states)) * work + 5)
        assert set(self.bench.ledger.ended) == set(self.bench.states)
        for rid, event in self.bench.ledger.ended.items():
            self.check(rid, event)

    def check(self, rid: str, event: Final | Failed) -> None:
        state = self.bench.states[rid]
        expected = expected_tokens(state.prompt, state.count)
        got = tuple(self.bench.ledger.tokens[rid])
        assert got == expected[: len(got)], f"{rid} gave {got} instead of {expected}"
        if isinstance(event, Failed):
            refused = isinstance(event.error, RequestFailedError)
            by_design = rid in self.saboteur.casualties | (
                self.oversized if refused else self.faulty
            )
            assert by_design, f"{rid} failed with {event.error!r}"
        elif event.cancelled:
            assert rid in self.cancelled
        else:
            assert got == expected


TestLoopMachine = LoopMachine.TestCase
TestLoopMachine.settings = settings(
    max_examples=300,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
