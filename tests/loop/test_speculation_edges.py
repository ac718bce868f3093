"""Looking ahead along an edge from one node to another: both ends must allow it."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from phalanx.device.cpu import CpuBackend
from phalanx.loop.outlook import Outlook
from phalanx.step.engine import StepEngine
from phalanx.step.resources.kv_cache import KVConfig, KVSpec
from phalanx.step.resources.positions import PositionSpec
from phalanx.testing.step_models import CacheReader
from phalanx.testing.token_request import NODE, TokenRequest
from tests.loop.ledger import Bench
from tests.loop.surprising import check_outputs
from tests.loop.threaded import ThreadedLoop

NODES = (NODE, "other")


class Alternating(TokenRequest):
    """Goes to the other node after every token; both see one cache."""

    def next_work(self):
        work = super().next_work()
        return None if work is None else self._placed(work, len(self.outputs))

    def work_after(self, span):
        work = super().work_after(span)
        if isinstance(work, Outlook):
            return work
        gives = self.computed + span == self.num_tokens
        return self._placed(work, len(self.outputs) + gives)

    @staticmethod
    def _placed(work, num_outputs: int):
        return replace(work, node=NODES[num_outputs % 2])


class Closed(CacheReader):
    speculates = False


def bench_of_two(other: CacheReader) -> Bench:
    nodes = frozenset(NODES)
    config = KVConfig(1, 1, 2, num_pages=64, page_size=4, max_seq_len=99, dtype=torch.float64)
    engine = StepEngine(CpuBackend())
    engine.load_model(
        {NODE: CacheReader(), "other": other},
        [KVSpec("kv", nodes, config), PositionSpec("positions", nodes)],
    )
    return Bench(engine, kind=ThreadedLoop)


@pytest.mark.parametrize("num_requests", [1, 3])
def test_item_8_5_9_a_step_of_the_next_node_is_prepared_on_the_outputs_of_this_one(num_requests):
    other = CacheReader()
    bench = bench_of_two(other)
    for index in range(num_requests):
        bench.start(f"r{index}", 3 + index, 6, kind=Alternating)
    bench.finish()
    bench.loop.close()
    check_outputs(bench)
    assert other.num_forwards == 3
    assert bench.loop.num_ahead == bench.loop.num_steps - 1


def test_an_edge_to_a_node_that_does_not_speculate_is_not_taken_ahead():
    bench = bench_of_two(Closed())
    bench.start("a", 3, 6, kind=Alternating)
    bench.finish()
    bench.loop.close()
    check_outputs(bench)
    assert bench.loop.num_ahead == 0
