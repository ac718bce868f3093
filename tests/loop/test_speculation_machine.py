"""Random lives of a loop that looks ahead: all end as they would alone, one step after another."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings

from phalanx.loop.eviction import LeastRecentlyUsed
from phalanx.loop.pipelined_loop import PipelinedLoop
from phalanx.testing.token_request import Stage, StepFault
from tests.loop.life import Life, Surroundings
from tests.loop.surprising import StoppingRequest
from tests.loop.test_machine import LoopMachine, crowded_life
from tests.loop.threaded import ThreadedLoop

SMALL = Surroundings(
    num_pages=3,
    page_size=3,
    tokens=64,
    running=6,
    batched=True,
    max_rows=None,
    host_pages=0,
    eviction=LeastRecentlyUsed(),
)


class LookingAheadMachine(LoopMachine):
    loop = ThreadedLoop


@pytest.mark.long
class TestLookingAheadMachine(LookingAheadMachine.TestCase):
    """Finds short lives that go wrong."""


TestLookingAheadMachine.settings = settings(
    max_examples=150,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)


@pytest.mark.parametrize("kind", [PipelinedLoop, ThreadedLoop])
def test_who_ended_by_what_it_foresaw_is_not_asked_again(kind):
    life = Life(replace(SMALL, loop=kind))
    for count in (0, 0, 2):
        life.start(1, count, 0, None)
    life.start(5, 2, 0, StepFault(Stage.WORK_AFTER, 1), kind=StoppingRequest)
    life.end()


@pytest.mark.parametrize("kind", [PipelinedLoop, ThreadedLoop])
@pytest.mark.parametrize("seed", range(16))
def test_item_8_5_9_a_crowded_life_that_looks_ahead(seed, kind):
    crowded_life(random.Random(seed), kind).end()


@pytest.mark.long
@pytest.mark.parametrize("kind", [PipelinedLoop, ThreadedLoop])
@pytest.mark.parametrize("seed", range(16, 60))
def test_item_8_5_12_many_crowded_lives_that_look_ahead(seed, kind):
    crowded_life(random.Random(seed), kind).end()
