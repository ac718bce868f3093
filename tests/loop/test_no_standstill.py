"""Who is refused, and alone in its step, does not keep the others from making the room it waits for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from msgspec import structs

from phalanx.device.cpu import CpuBackend
from phalanx.loop.pipelined_loop import PipelinedLoop
from phalanx.loop.request import Work
from phalanx.loop.scheduler import Budget
from phalanx.loop.step_loop import StepLoop
from phalanx.schema.events import Final
from phalanx.step.declaration import Segment, SubmoduleStep
from phalanx.step.engine import StepEngine
from phalanx.step.outputs import NodeOutputs
from phalanx.step.resources.kv_cache import KVConfig, KVSpec, KVStep
from phalanx.step.submodule import NodeSubmodule
from phalanx.testing.step_models import CacheReader, cache_reader_engine, expected_tokens
from phalanx.testing.token_request import NODE
from tests.loop.ledger import Bench
from tests.loop.threaded import ThreadedLoop

LOOPS = pytest.mark.parametrize("kind", [StepLoop, PipelinedLoop, ThreadedLoop])


class TwoStreams(CacheReader):
    """Requests of the walk "two" keep all their tokens twice."""

    def declare_step(self, walk, rows, inputs):
        step = super().declare_step(walk, rows, inputs)
        again = [structs.replace(one, label="again") for one in step.segments if walk == "two"]
        kv = KVStep((*step.segments, *again))
        return replace(step, resources={**step.resources, "kv": kv})


def check_outputs(bench: Bench) -> None:
    for rid, state in bench.states.items():
        assert bench.output(rid) == expected_tokens(state.prompt, state.count)
    bench.loop.close()


@LOOPS
@pytest.mark.parametrize("priority", [0, 1])
@pytest.mark.parametrize("host_pages", [0, 2, 8])
def test_a_refused_request_of_another_walk_lets_the_older_one_end(kind, host_pages, priority):
    engine = cache_reader_engine(7, 4, node=TwoStreams(), host_pages=host_pages)
    bench = Bench(engine, tokens=64, kind=kind)
    bench.start("old", 4, 12, place=(NODE, "one"))
    bench.start("two", 5, 8, priority, place=(NODE, "two"))
    bench.finish(max_ticks=60)
    check_outputs(bench)


class Alone(NodeSubmodule):
    """Keeps a stream of a request in a cache of its own."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self.key = key

    def declare_step(self, walk, rows, inputs):
        segments = tuple(Segment(row.request_id, row.span) for row in rows)
        return SubmoduleStep(segments, {self.key: KVStep(segments)})

    def preprocess(self, engine, inputs):
        return None

    def forward(self, prepared):
        return NodeOutputs()


class Tour:
    """Wants so many tokens of one node after the other."""

    def __init__(self, *stops: tuple[str, int]) -> None:
        self.stops = list(stops)
        self.held = {"first": 0, "second": 0}

    def next_work(self):
        if not self.stops:
            return None
        node, span = self.stops[0]
        return Work(node, node, span, self.held[node] + span, divisible=False)

    def resource_configs(self):
        return {}

    def advance(self, span):
        node, _ = self.stops.pop(0)
        self.held[node] += span

    def adopt(self, num_tokens):
        raise AssertionError("nothing is known of its tokens")

    def push_back(self):
        raise AssertionError("there is room on the host")

    def take_delta(self):
        return None

    def output(self, *, cancelled):
        return "done"


@LOOPS
def test_a_request_that_cannot_come_back_lets_the_others_go_on(kind):
    """The tourist's next node has room enough, but what it left at the first does not come back."""
    engine = StepEngine(CpuBackend())
    config = KVConfig(1, 1, 4, 4, 4, 64, torch.float32, host_pages=16)
    big = replace(config, num_pages=16)
    engine.load_model(
        {"first": Alone("a"), "second": Alone("b")},
        [KVSpec("a", frozenset({"first"}), config), KVSpec("b", frozenset({"second"}), big)],
    )
    loop = kind(engine, Budget(64, 8))
    loop.start("stays", Tour(("first", 4), *[("first", 1)] * 9))
    loop.start("tourist", Tour(("first", 8), *[("second", 1)] * 20))
    events = []
    num_ticks = 0
    while loop.busy and num_ticks < 90:
        events += loop.tick()
        num_ticks += 1
    assert loop.idle
    assert loop.num_steps >= num_ticks - 1, "who is kept out does not take the others' step"
    ended = [event.rid for event in events if isinstance(event, Final)]
    assert sorted(ended) == ["stays", "tourist"]
    assert loop.num_offloads > 0
    assert engine.at_rest()
    loop.close()
