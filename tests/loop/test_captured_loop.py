"""Loops whose steps are captured, planned ahead and speculated give what each request gives alone."""

from __future__ import annotations

import pytest
import torch

from phalanx.device.operators.torch_operators import TorchOperators
from phalanx.loop.step_loop import StepLoop
from phalanx.testing.token_request import NODE
from phalanx.testing.toy_decoder import toy_decoder_engine
from tests.loop import test_toy_decoder_loop as decoder
from tests.loop.ledger import Bench
from tests.loop.threaded import ThreadedLoop


@pytest.fixture(scope="module")
def alone():
    """Each request's tokens and logits by a plain loop, eagerly, when nobody else is there."""
    torch.set_num_threads(1)
    found = {}
    for index, rid in enumerate(decoder.NAMES):
        bench = Bench(toy_decoder_engine(TorchOperators(), 40, 4))
        decoder.start(bench, index)
        bench.finish()
        found[rid] = (bench.output(rid), decoder.logits(bench, rid))
    return found


POOLS = [(200, 16, 4), pytest.param(200, 5, 8, marks=pytest.mark.long), (10, 6, 3)]


@pytest.mark.parametrize("mode", ["tape", "rerun"])
@pytest.mark.parametrize("kind", [StepLoop, ThreadedLoop])
@pytest.mark.parametrize(("pages", "tokens", "running"), POOLS)
def test_item_8_5_12_captured_and_speculated(alone, mode, kind, pages, tokens, running):
    engine = toy_decoder_engine(TorchOperators(), pages, 4, capture=mode)
    node = engine._nodes[NODE].submodule
    before = node.num_forwards
    bench = Bench(engine, tokens=tokens, running=running, kind=kind)
    for index in range(len(decoder.NAMES)):
        decoder.start(bench, index)
        if index % 3 == 2:
            bench.tick()
    bench.finish()
    if kind is ThreadedLoop:
        bench.loop.close()
        assert bench.loop.num_ahead > 0
    for rid, (expected, rows) in alone.items():
        assert bench.output(rid) == expected
        torch.testing.assert_close(decoder.logits(bench, rid), rows, rtol=1e-5, atol=1e-5)
    if mode == "tape" and running <= 4:
        assert node.num_forwards == before, "every step fits a shape"
    assert engine.at_rest()
