"""The same schedules on a CUDA device, with real streams and graphs."""

from __future__ import annotations

import random

import pytest
import torch

from phalanx.device.operators.torch_operators import TorchOperators
from phalanx.loop.pipelined_loop import PipelinedLoop
from phalanx.loop.step_loop import StepLoop
from phalanx.testing.toy_decoder import VOCAB_SIZE, toy_decoder_engine
from tests.loop import test_toy_decoder_loop as decoder
from tests.loop.ledger import Bench
from tests.step.graphs.test_toy_captured import (
    NUM_PAGES,
    PAGE,
    SAMPLERS,
    alone,
    numbers,
    together,
    tokens,
)

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device; none is visible to torch"
)
NEAR = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(scope="module")
def engines():
    return {
        mode: toy_decoder_engine(TorchOperators(), NUM_PAGES, PAGE, capture=mode, target="cuda")
        for mode in ("off", "graph", "rerun")
    }


@pytest.mark.parametrize("seed", range(20))
def test_item_8_5_12_a_schedule_on_cuda_graphs_gives_what_each_request_gives_alone(engines, seed):
    dice = random.Random(seed)
    wanted = {
        f"r{index}": (
            tuple(dice.randrange(VOCAB_SIZE) for _ in range(dice.randint(1, 11))),
            dice.randint(1, 5),
            dice.choice(SAMPLERS),
        )
        for index in range(dice.randint(1, 6))
    }
    schedule = [(dice.randint(0, 3), dice.random() < 0.5, dice.randint(1, 8)) for _ in range(8)]
    eager = alone(engines["off"], wanted)
    for mode in ("graph", "rerun"):
        found = together(engines[mode], wanted, schedule)
        for rid, rows in numbers(found).items():
            torch.testing.assert_close(rows, numbers(eager)[rid][: len(rows)], **NEAR)
            given = tokens(found)[rid]
            assert given == tokens(eager)[rid][: len(given)]
    assert all(engine.at_rest() for engine in engines.values())


@pytest.mark.parametrize("kind", [StepLoop, PipelinedLoop])
@pytest.mark.parametrize(("pages", "budget", "running"), [(200, 16, 4), (200, 5, 8), (10, 6, 3)])
def test_item_8_5_12_loops_on_cuda_graphs(kind, pages, budget, running):
    def bench_of(pages: int, capture: str, **options) -> Bench:
        engine = toy_decoder_engine(TorchOperators(), pages, 4, capture=capture, target="cuda")
        return Bench(engine, **options)

    bench = bench_of(pages, "graph", tokens=budget, running=running, kind=kind)
    for index in range(len(decoder.NAMES)):
        decoder.start(bench, index)
        if index % 3 == 2:
            bench.tick()
    bench.finish()
    bench.loop.close()
    for index, rid in enumerate(decoder.NAMES):
        one = bench_of(40, "off")
        decoder.start(one, index)
        one.finish()
        assert bench.output(rid) == one.output(rid)
        torch.testing.assert_close(decoder.logits(bench, rid), decoder.logits(one, rid), **NEAR)
