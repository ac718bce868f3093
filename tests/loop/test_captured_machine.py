"""Random lives of loops whose steps are captured: all end as they would eagerly and alone."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings

from phalanx.loop.pipelined_loop import PipelinedLoop
from phalanx.loop.step_loop import StepLoop
from phalanx.testing.token_request import NODE
from tests.loop.test_machine import LoopMachine, crowded_life
from tests.loop.threaded import ThreadedLoop


class CapturedMachine(LoopMachine):
    loop = ThreadedLoop
    capture = "tape"


@pytest.mark.long
class TestCapturedMachine(CapturedMachine.TestCase):
    """Finds short lives that go wrong."""


TestCapturedMachine.settings = settings(
    max_examples=60,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)


@pytest.mark.parametrize("mode", ["tape", "rerun"])
@pytest.mark.parametrize("kind", [StepLoop, ThreadedLoop])
@pytest.mark.parametrize("seed", range(3))
def test_item_8_5_13_a_crowded_life_on_captured_steps(mode, kind, seed):
    life = crowded_life(random.Random(seed), kind, mode)
    life.end()
    node = life.bench.engine._nodes[NODE].submodule
    assert node.num_forwards < life.bench.loop.num_steps / 2, "most steps are replayed"


@pytest.mark.long
@pytest.mark.parametrize("mode", ["tape", "rerun"])
@pytest.mark.parametrize("kind", [StepLoop, PipelinedLoop, ThreadedLoop])
@pytest.mark.parametrize("seed", range(3, 16))
def test_item_8_5_12_many_crowded_lives_on_captured_steps(mode, kind, seed):
    crowded_life(random.Random(seed), kind, mode).end()
