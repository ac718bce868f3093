"""Every small model passes the check of nodes, and its settings make a difference."""

from __future__ import annotations

import pytest

from phalanx.device.cpu import CpuBackend
from phalanx.loop.pipelined_loop import PipelinedLoop
from phalanx.loop.scheduler import Budget
from phalanx.testing import check_submodule
from tests.testing.models import CASES

SLOW = {"decoder", "encoder-decoder", "guided flow"}


@pytest.mark.parametrize("name", [name for name in CASES if name not in SLOW])
def test_a_small_model_passes_the_check(name):
    check_submodule(CASES[name])


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(SLOW))
def test_a_larger_one_does_too(name):
    check_submodule(CASES[name])


@pytest.mark.parametrize("capture", ["off", "tape"])
def test_a_flow_is_prepared_ahead(capture):
    """Nothing that a step gives decides what comes next, so every step may be planned before it."""
    case = CASES["guided flow"]
    engine = case.parts().engine(CpuBackend(capture=capture))
    engine.warm_up()
    loop = PipelinedLoop(engine, Budget(256, 8))
    for index, request in enumerate(case.requests):
        loop.start(f"r{index}", request())
    while loop.busy:
        loop.tick()
    loop.close()
    assert loop.num_ahead > loop.num_steps / 2
    assert loop.num_discarded == 0
    assert engine.at_rest()
