"""Random lives of a loop: whatever arrives, leaves, pauses, fails or runs out of room, every request
ends once with what it gives alone, and in the end everything is as at the start."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from phalanx.loop.eviction import LeastRecentlyUsed, Priority
from phalanx.loop.step_loop import StepLoop
from phalanx.schema.control import PauseMode
from phalanx.testing.token_request import NODE, Stage, StepFault, TokenRequest
from tests.loop.life import Life, Refusal, Surroundings
from tests.loop.surprising import StoppingRequest, WanderingRequest

FAULTS = st.builds(StepFault, st.sampled_from(Stage), st.integers(0, 3))


class LoopMachine(RuleBasedStateMachine):
    """Finds short lives that go wrong."""

    loop = StepLoop
    capture = "off"

    @initialize(
        around=st.builds(
            Surroundings,
            num_pages=st.integers(2, 8),
            page_size=st.integers(1, 4),
            tokens=st.sampled_from([64, 8, 3, 2, 1]),
            running=st.sampled_from([6, 3, 2, 1]),
            batched=st.sampled_from([True, True, False]),
            max_rows=st.sampled_from([None, None, 3, 2, 1]),
            host_pages=st.sampled_from([0, 0, 2, 5, 20]),
            eviction=st.sampled_from([LeastRecentlyUsed(), Priority()]),
        )
    )
    def begin(self, around):
        self.life = Life(replace(around, loop=self.loop, capture=self.capture))

    @rule(
        length=st.integers(1, 12),
        count=st.integers(0, 7),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
        walk=st.sampled_from(["w", "w", "w", "v"]),
        skips=st.sampled_from([0, 0, 0, 0, 2]),
        indivisible=st.sampled_from([False, False, False, True]),
        fault=st.one_of(st.none(), FAULTS),
        kind=st.sampled_from([TokenRequest, TokenRequest, StoppingRequest, WanderingRequest]),
    )
    def start(self, length, count, priority, walk, skips, indivisible, fault, kind):
        options = {"skips": skips, "indivisible": indivisible, "place": (NODE, walk), "kind": kind}
        self.life.start(length, count, priority, fault, **options)

    @rule(
        sizes=st.lists(st.tuples(st.integers(1, 8), st.integers(1, 7)), min_size=2, max_size=6),
        fault=st.one_of(st.none(), FAULTS),
    )
    def start_many(self, sizes, fault):
        self.life.start_many(sizes, fault)

    @rule(num_ticks=st.integers(1, 6))
    def tick(self, num_ticks):
        self.life.tick(num_ticks)

    @rule(choice=st.integers(0, 10**6))
    def cancel(self, choice):
        self.life.cancel(choice)

    @rule(mode=st.sampled_from(PauseMode), waits=st.booleans())
    def pause(self, mode, waits):
        self.life.pause(mode, waits)

    @rule(refusal=st.sampled_from(Refusal), named=st.booleans())
    def refuse_next(self, refusal, named):
        self.life.refuse_next(refusal, named=named)

    @rule()
    def wake(self):
        self.life.wake()

    @rule(choice=st.integers(0, 10**6))
    def move_away(self, choice):
        self.life.move_away(choice)

    def teardown(self):
        if hasattr(self, "life"):
            self.life.end()


TestLoopMachine = LoopMachine.TestCase
TestLoopMachine.settings = settings(
    max_examples=15,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)


class LongLoopMachine(LoopMachine):
    """The same for longer."""


TestLoopMachineAtLength = pytest.mark.long(LongLoopMachine.TestCase)
TestLoopMachineAtLength.settings = settings(TestLoopMachine.settings, max_examples=100)


def crowded_life(
    dice: random.Random, loop: type[StepLoop] = StepLoop, capture: str = "off"
) -> Life:
    """A life in which many run together, so that what one does is felt by others."""
    life = Life(
        Surroundings(
            num_pages=dice.randint(3, 10),
            page_size=dice.randint(1, 4),
            tokens=dice.choice([4, 8, 64]),
            running=dice.choice([4, 8]),
            batched=dice.random() < 0.7,
            max_rows=dice.choice([None, None, 3]),
            host_pages=dice.choice([0, 3, 30]),
            eviction=dice.choice([LeastRecentlyUsed(), Priority()]),
            loop=loop,
            capture=capture,
        )
    )
    for _ in range(12):
        sizes = [(dice.randint(1, 6), dice.randint(1, 6)) for _ in range(dice.randint(1, 4))]
        fault = StepFault(dice.choice(list(Stage)), dice.randint(0, 2))
        life.start_many(sizes, fault if dice.random() < 0.5 else None)
        life.tick(dice.randint(0, 4))
        if dice.random() < 0.15:
            life.cancel(dice.randint(0, 100))
        if dice.random() < 0.1:
            life.pause(dice.choice(list(PauseMode)), waits=False)
        if dice.random() < 0.1:
            life.refuse_next(dice.choice(list(Refusal)), named=dice.random() < 0.5)
        if dice.random() < 0.2:
            life.wake()
        if dice.random() < 0.1:
            life.move_away(dice.randint(0, 100))
    return life


@pytest.mark.parametrize(
    "seed", [*range(40), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(40, 80))]
)
def test_item_8_5_13_a_crowded_life(seed):
    crowded_life(random.Random(seed)).end()
