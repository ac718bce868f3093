"""The loop cannot deadlock or starve: pools that are as small as they can be, and endless arrivals."""

from __future__ import annotations

import pytest

from phalanx.step.resources.kv_cache import KVCache
from phalanx.testing.step_models import CacheReader, cache_reader_engine, expected_tokens
from tests.loop.ledger import Bench


def check_outputs(bench: Bench) -> None:
    for rid, state in bench.states.items():
        assert bench.output(rid) == expected_tokens(state.prompt, state.count)


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("page_size", [1, 2, 5])
def test_a_pool_of_exactly_one_request(page_size, batched):
    length, count = 7, 5
    num_pages = -(-(length + count - 1) // page_size)
    engine = cache_reader_engine(num_pages, page_size, node=CacheReader(batched=batched))
    bench = Bench(engine, tokens=3)
    for index in range(6):
        bench.start(f"r{index}", length, count)
    bench.finish(max_ticks=300)
    check_outputs(bench)
    assert bench.ledger.order == [f"r{index}" for index in range(6)]


def test_the_oldest_gets_on_in_every_step_but_those_of_its_elders():
    """Whoever is first in rank is never pushed back and never left out for long."""
    bench = Bench(cache_reader_engine(6, 2), tokens=8)
    for index in range(6):
        bench.start(f"r{index}", 4, 8)
    oldest = 0
    while bench.loop.busy:
        before = bench.states[f"r{oldest}"].computed
        bench.tick()
        state = bench.states[f"r{oldest}"]
        assert state.num_push_backs == 0 or oldest > 0
        assert f"r{oldest}" in bench.ledger.ended or state.computed > before
        while f"r{oldest}" in bench.ledger.ended and oldest < 5:
            oldest += 1
    check_outputs(bench)
    assert bench.ledger.order == [f"r{index}" for index in range(6)]


@pytest.mark.parametrize(("tokens", "running"), [(16, 8), (2, 8), (16, 50), (1, 1)])
def test_fifty_requests_through_a_pool_for_two(tokens, running):
    length, count, page_size = 6, 4, 2
    pages = 2 * -(-(length + count - 1) // page_size)
    bench = Bench(cache_reader_engine(pages, page_size), tokens=tokens, running=running)
    for index in range(50):
        bench.start(f"r{index}", length - index % 3, count, priority=index % 4)
    # Alone each needs its prompt in chunks and a step a token.
    bench.finish(max_ticks=50 * (length + count) * 2)
    check_outputs(bench)
    firsts = [int(rid[1:]) % 4 for rid in bench.ledger.order[:10]]
    assert firsts.count(3) >= 8, "the highest priority goes first"


def test_pushed_back_requests_do_not_keep_pages():
    bench = Bench(cache_reader_engine(5, 2), tokens=8)
    for index in range(4):
        bench.start(f"r{index}", 3, 6)
    cache = bench.engine.resource("kv")
    assert isinstance(cache, KVCache)
    while bench.loop.busy:
        bench.tick()
        held = {rid for rid in bench.states if cache.stored_len(rid)}
        assert len(held) <= bench.loop.num_running
    assert bench.loop.num_push_backs > 0
    check_outputs(bench)


def test_endless_short_prompts_do_not_starve_a_long_one():
    bench = Bench(cache_reader_engine(400, 4), tokens=16, running=64)
    bench.start("long", 160, 3)
    num_ticks = 0
    while "long" not in bench.ledger.ended:
        bench.start(f"short {num_ticks}", 16, 1)
        bench.tick()
        num_ticks += 1
        assert num_ticks < 60, "a tenth of its prompt every other step is enough"
    assert bench.output("long") == expected_tokens(bench.states["long"].prompt, 3)
    bench.finish()
    check_outputs(bench)


def test_endless_decoding_does_not_starve_a_prompt():
    bench = Bench(cache_reader_engine(400, 4), tokens=4, running=64)
    for index in range(4):
        bench.start(f"decoding {index}", 1, 5 + index)
    bench.tick()
    bench.start("prompt", 30, 2)
    num_ticks = 0
    while "prompt" not in bench.ledger.ended:
        bench.start(f"short {num_ticks}", 1, 6)
        bench.tick()
        num_ticks += 1
        assert num_ticks < 120
    bench.finish(max_ticks=4000)
    check_outputs(bench)


def test_indivisible_work_is_not_starved_by_decoding():
    bench = Bench(cache_reader_engine(400, 4), tokens=8, running=8)
    for index in range(4):
        bench.start(f"decoding {index}", 1, 40)
    bench.tick()
    bench.start("image", 8, 2, indivisible=True)
    for num_ticks in range(200):
        if "image" in bench.ledger.ended:
            break
        bench.tick()
    assert num_ticks < 10
    bench.finish()
    check_outputs(bench)


def test_a_walk_is_not_starved_by_a_busier_one():
    bench = Bench(cache_reader_engine(400, 4), tokens=4, running=32)
    bench.start("rare", 20, 4, place=("toy", "rare"))
    num_ticks = 0
    while "rare" not in bench.ledger.ended:
        for index in range(2):
            bench.start(f"busy {num_ticks} {index}", 1, 4)
        bench.tick()
        num_ticks += 1
        assert num_ticks < 80
    bench.finish(max_ticks=4000)
    check_outputs(bench)


def test_decode_rows_beyond_the_budget_advance_alike():
    """Five prompts come in side by side and then decode, three rows a step."""
    bench = Bench(cache_reader_engine(400, 4), tokens=3, running=16)
    for index in range(5):
        bench.start(f"r{index}", 12, 30)
    while not all(state.outputs for state in bench.states.values()):
        bench.tick()
    before = [len(state.outputs) for state in bench.states.values()]
    for _ in range(20):
        bench.tick()
    gained = [len(state.outputs) - had for state, had in zip(bench.states.values(), before)]
    assert gained == [12] * 5
    bench.finish()
    check_outputs(bench)
