"""Random lives of a loop that looks ahead: all end as they would alone, one step after another."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings

from phalanx.loop.pipelined_loop import PipelinedLoop
from tests.loop.test_machine import LoopMachine, crowded_life
from tests.loop.threaded import ThreadedLoop


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
@pytest.mark.parametrize("seed", range(16))
def test_item_8_5_9_a_crowded_life_that_looks_ahead(seed, kind):
    crowded_life(random.Random(seed), kind).end()


@pytest.mark.long
@pytest.mark.parametrize("kind", [PipelinedLoop, ThreadedLoop])
@pytest.mark.parametrize("seed", range(16, 250))
def test_item_8_5_12_many_crowded_lives_that_look_ahead(seed, kind):
    crowded_life(random.Random(seed), kind).end()
