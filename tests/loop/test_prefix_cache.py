"""A loop whose requests begin alike: what is known is not computed again, and it does not show."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from phalanx.device.operators.torch_operators import TorchOperators
from phalanx.loop.pipelined_loop import PipelinedLoop
from phalanx.loop.step_loop import StepLoop
from phalanx.schema.events import Final
from phalanx.step.resources.penalties import Penalties
from phalanx.step.resources.sampler import SamplerConfig
from phalanx.step.resources.sampling import RowFilter
from phalanx.testing.step_models import CacheReader, cache_reader_engine, expected_tokens
from phalanx.testing.toy_decoder import VOCAB_SIZE, toy_decoder_engine
from tests.loop.ledger import Bench, bench_of, expected, prompt_of
from tests.loop.threaded import ThreadedLoop
from tests.step.page_books import check_pages

LONG = prompt_of(42)


def steps(bench: Bench) -> int:
    """How many steps it takes until nobody is left."""
    before = bench.loop.num_steps
    bench.finish()
    return bench.loop.num_steps - before


def test_the_same_prompt_a_second_time_computes_only_its_tail():
    bench = bench_of(tokens=4)
    bench.start("first", 0, 3, prompt=LONG)
    assert steps(bench) == 11 + 2
    bench.start("again", 0, 3, prompt=LONG)
    assert steps(bench) == 1 + 2
    assert bench.states["again"].num_adopted == 40
    assert bench.output("again") == bench.output("first") == expected(bench, "first")


def test_a_longer_prompt_computes_what_is_new():
    """The next turn of a talk: the last prompt, its answer, and a few tokens more."""
    bench = bench_of(tokens=4)
    bench.start("first", 0, 7, prompt=LONG)
    bench.finish()
    prompt = (*LONG, *bench.output("first"), 5, 6, 7)
    bench.start("next", 0, 2, prompt=prompt)
    assert steps(bench) == 1 + 1
    assert bench.states["next"].num_adopted == 48
    assert bench.output("next") == expected(bench, "next")


def test_requests_that_arrive_together_compute_their_beginning_once():
    bench = bench_of(200, tokens=40)
    for index in range(8):
        bench.start(f"r{index}", 0, 1, prompt=(*LONG[:40], index, index))
    assert steps(bench) == 2
    adopted = [state.num_adopted for state in bench.states.values()]
    assert adopted == [0] + [40] * 7
    for rid in bench.states:
        assert bench.output(rid) == expected(bench, rid)


def test_a_request_joins_what_another_has_got_ahead_with():
    """It has begun to compute the same prompt and skips to where the other stands."""
    bench = bench_of(200, tokens=8)
    bench.start("ahead", 0, 1, prompt=LONG)
    for _ in range(3):
        bench.tick()
    bench.start("behind", 0, 1, prompt=LONG)
    bench.tick()
    assert bench.states["behind"].num_adopted == 24
    bench.finish()
    assert bench.output("behind") == bench.output("ahead") == expected(bench, "ahead")


def test_a_request_that_was_pushed_back_goes_on_where_it_was():
    bench = bench_of(tokens=4)
    bench.start("r", 0, 12, prompt=LONG)
    while len(bench.states["r"].outputs) < 9:
        bench.tick()
    bench.loop.push_back_all()
    assert bench.cache.used_tokens == 0
    assert steps(bench) == 3
    assert bench.states["r"].num_adopted == 48
    assert bench.output("r") == expected(bench, "r")


def test_kept_pages_make_way_for_requests():
    bench = bench_of(12, page_size=4)
    for index in range(6):
        bench.start(f"r{index}", 40, 8)
        bench.finish()
        assert bench.output(f"r{index}") == expected(bench, f"r{index}")
    assert bench.loop.num_push_backs == 0
    assert bench.cache.cached_tokens == 44


def test_what_is_forgotten_is_computed_again():
    bench = bench_of(tokens=4)
    for _ in range(2):
        bench.start("r", 0, 3, prompt=LONG)
        assert steps(bench) == 11 + 2
        bench.engine.prefixes.forget()
    assert bench.cache.cached_tokens == 0


SAMPLERS = [
    SamplerConfig(RowFilter(0.0), seed=0),
    SamplerConfig(RowFilter(0.9, top_k=8, top_p=0.9), seed=12),
    SamplerConfig(RowFilter(1.1), 13, Penalties(frequency=0.4, presence=0.2, repetition=1.2)),
]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=("greedy", "filtered", "penalties"))
def test_a_decoder_gives_the_same_numbers_with_what_is_known(sampler):
    """The rows of a step are multiplied one by one here, so results are equal to the last bit."""
    prompt = tuple(token % VOCAB_SIZE for token in LONG)
    bench = Bench(toy_decoder_engine(TorchOperators(), 40, 4, batched=False), tokens=1)
    for rid in ("first", "again"):
        bench.start(rid, 0, 8, prompt=prompt, sampler=sampler)
        bench.finish()
    first, again = bench.states["first"], bench.states["again"]
    assert (first.num_adopted, again.num_adopted) == (0, 40)
    assert bench.output("again") == bench.output("first")
    for one, other in zip(first.numbers, again.numbers, strict=True):
        assert torch.equal(torch.tensor(one["logits"]), torch.tensor(other["logits"]))


class SharingMachine(RuleBasedStateMachine):
    """Prompts of few different tokens in a pool of few pages: every request gives what it gives
    alone, and pages are held, kept or free.
    """

    @initialize(
        num_pages=st.integers(3, 10),
        page_size=st.integers(1, 3),
        tokens=st.sampled_from([1, 3, 5, 64]),
        running=st.sampled_from([1, 3, 6]),
        batched=st.booleans(),
        host_pages=st.sampled_from([0, 3, 9]),
        kind=st.sampled_from([StepLoop, PipelinedLoop, ThreadedLoop]),
    )
    def begin(self, num_pages, page_size, tokens, running, batched, host_pages, kind):
        node = CacheReader(batched=batched)
        engine = cache_reader_engine(num_pages, page_size, node=node, host_pages=host_pages)
        self.bench = Bench(engine, tokens=tokens, running=running, kind=kind)
        self.pool = num_pages * page_size
        self.texts = [(0, 0, 0, 0, 0, 0, 0, 0, 0, 0)]

    @rule(
        text=st.integers(0, 99),
        cut=st.integers(0, 12),
        tail=st.lists(st.integers(0, 1), min_size=1, max_size=6),
        count=st.integers(1, 6),
    )
    def start(self, text, cut, tail, count):
        """The beginning of an earlier prompt with its answer, and something new."""
        prompt = (*self.texts[text % len(self.texts)][:cut], *tail)[: self.pool]
        rid = f"r{len(self.bench.states)}"
        self.bench.start(rid, 0, min(count, self.pool - len(prompt) + 1), prompt=prompt)
        self.texts.append(prompt)

    @rule(num_ticks=st.integers(1, 8))
    def tick(self, num_ticks):
        for _ in range(num_ticks):
            ended = set(self.bench.ledger.ended)
            self.bench.tick()
            check_pages(self.bench.cache)
            for rid in self.bench.ledger.ended.keys() - ended:
                self.texts.append((*self.bench.states[rid].prompt, *self.bench.output(rid)))

    @rule(choice=st.integers(0, 99))
    def cancel(self, choice):
        live = sorted(self.bench.ledger.live)
        if live:
            self.bench.loop.cancel(live[choice % len(live)])
            check_pages(self.bench.cache)

    @rule(choice=st.integers(0, 99))
    def move_away(self, choice):
        live = sorted(self.bench.ledger.live)
        if live:
            self.bench.engine.residency.offload(live[choice % len(live)])
            check_pages(self.bench.cache)

    @rule()
    def push_back(self):
        self.bench.loop.push_back_all()
        check_pages(self.bench.cache)
        assert self.bench.cache.used_tokens == 0

    @rule()
    def forget(self):
        self.bench.engine.prefixes.forget()
        check_pages(self.bench.cache)

    def teardown(self):
        if not hasattr(self, "bench"):
            return
        bench = self.bench
        bench.finish()
        bench.loop.close()
        check_pages(bench.cache)
        assert bench.cache.num_free_pages == bench.cache.config.num_pages
        for rid, event in bench.ledger.ended.items():
            state = bench.states[rid]
            got = bench.output(rid)
            assert got == expected_tokens(state.prompt, state.count)[: len(got)]
            assert isinstance(event, Final)
            assert event.cancelled or len(got) == state.count


TestSharingMachine = SharingMachine.TestCase
TestSharingMachine.settings = settings(
    max_examples=80,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
