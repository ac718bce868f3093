"""A decoder whose steps are captured gives what it gives eagerly, each request alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.device.operators.torch_operators import TorchOperators
from phalanx.step.engine import StepEngine
from phalanx.step.resources.penalties import Penalties
from phalanx.step.resources.sampler import SamplerConfig
from phalanx.step.resources.sampling import RowFilter
from phalanx.testing.token_request import NODE, TokenRequest
from phalanx.testing.toy_decoder import VOCAB_SIZE, toy_decoder_engine
from tests.step.stepping import Stepping

NUM_PAGES, PAGE = 40, 4
SAMPLERS = [
    SamplerConfig(RowFilter(0.0), seed=0),
    SamplerConfig(RowFilter(1.0), seed=11),
    SamplerConfig(RowFilter(0.9, top_k=8, top_p=0.9), seed=12),
    SamplerConfig(RowFilter(1.1), 13, Penalties(frequency=0.4, presence=0.2)),
    SamplerConfig(RowFilter(0.0), 14, Penalties(repetition=1.3)),
    SamplerConfig(RowFilter(1.0, min_p=0.05), 15, logit_bias=((7, 2.0), (9, -100))),
    SamplerConfig(RowFilter(0.8), 16, forbidden=(1, 2, 3, 5, 8), forbidden_until=2),
    SamplerConfig(RowFilter(1.3, top_p=0.8), seed=11),
]


@pytest.fixture(scope="module")
def engines() -> dict[str, StepEngine]:
    torch.set_num_threads(1)
    return {
        mode: toy_decoder_engine(TorchOperators(), NUM_PAGES, PAGE, capture=mode)
        for mode in ("off", "tape", "rerun")
    }


@st.composite
def requests(draw):
    prompt = tuple(draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=11)))
    return prompt, draw(st.integers(1, 5)), draw(st.sampled_from(SAMPLERS))


def start(stepping: Stepping, rid: str, request) -> None:
    prompt, count, sampler = request
    state = TokenRequest(prompt, count, sampler=sampler)
    stepping.states[rid] = state
    stepping.engine.add_request(rid, state, state.resource_configs())


def numbers(stepping: Stepping) -> dict[str, torch.Tensor]:
    return {
        rid: torch.tensor([row["logits"] for row in state.numbers]).view(-1, VOCAB_SIZE)
        for rid, state in stepping.states.items()
    }


def tokens(stepping: Stepping) -> dict[str, list[int]]:
    return {rid: state.outputs for rid, state in stepping.states.items()}


def alone(engine: StepEngine, wanted) -> Stepping:
    """Each request by itself, the whole prompt at once."""
    stepping = Stepping(engine)
    for rid, request in wanted.items():
        start(stepping, rid, request)
        assert stepping.finish(rid) == {}
        engine.remove_request(rid)
    return stepping


def together(engine: StepEngine, wanted, schedule) -> Stepping:
    """By a schedule of (who joins, who leaves early, how many tokens a step each): then the rest."""
    stepping = Stepping(engine)
    live: list[str] = []
    waiting = list(wanted)

    def step(chunk: int) -> None:
        spans = {rid: min(chunk, left(stepping, rid)) for rid in live}
        if not spans:
            return
        batch = stepping.step(**spans)
        assert (batch.failed_requests, batch.admit_error) == ({}, None)
        for rid in list(live):
            if len(stepping.states[rid].outputs) >= stepping.states[rid].count:
                leave(rid)

    def leave(rid: str) -> None:
        live.remove(rid)
        engine.remove_request(rid)

    for joining, leaving, chunk in schedule:
        for rid in waiting[:joining]:
            start(stepping, rid, wanted[rid])
            live.append(rid)
        del waiting[:joining]
        if leaving and live:
            leave(live[0])
        step(chunk)
    while live:
        step(7)
    return stepping


def left(stepping: Stepping, rid: str) -> int:
    return stepping.states[rid].num_tokens - stepping.states[rid].computed


SCHEDULES = st.lists(
    st.tuples(st.integers(0, 3), st.booleans(), st.integers(1, 8)), min_size=3, max_size=8
)


WANTED = st.lists(requests(), min_size=1, max_size=6)


@settings(max_examples=8, deadline=None, database=None)
@given(wanted=WANTED, schedule=SCHEDULES)
def test_item_8_5_12_any_schedule_captured_gives_what_each_request_gives_alone(
    engines, wanted, schedule
):
    check_schedule(engines, wanted, schedule)


@pytest.mark.long
@settings(max_examples=300, deadline=None)
@given(wanted=WANTED, schedule=SCHEDULES)
def test_item_8_5_12_many_schedules(engines, wanted, schedule):
    check_schedule(engines, wanted, schedule)


def check_schedule(engines, wanted, schedule) -> None:
    named = {f"r{index}": request for index, request in enumerate(wanted)}
    eager = alone(engines["off"], named)
    tape = together(engines["tape"], named, schedule)
    rerun = together(engines["rerun"], named, schedule)
    for rid, rows in numbers(tape).items():
        assert torch.equal(rows, numbers(rerun)[rid]), "the tape baked nothing in"
        torch.testing.assert_close(rows, numbers(eager)[rid][: len(rows)], rtol=1e-5, atol=1e-5)
    assert tokens(rerun) == tokens(tape)
    for rid, given_tokens in tokens(tape).items():
        assert given_tokens == tokens(eager)[rid][: len(given_tokens)]
    for engine in engines.values():
        assert engine.at_rest()
        assert engine.resource("kv").num_free_pages == NUM_PAGES


def test_steps_that_fit_a_shape_call_no_forward(engines):
    engine = engines["tape"]
    node = engine._nodes[NODE].submodule
    stepping = Stepping(engine)
    for rid, sampler in zip("abcd", SAMPLERS, strict=False):
        start(stepping, rid, ((1, 2, 3, 4), 4, sampler))
    before = node.num_forwards
    slots = [stepping.step(a=0, b=0, c=0, d=0).lease.slot for _ in range(4)]
    assert node.num_forwards == before
    assert slots[0] != slots[1]
    assert slots == [slots[0], slots[1]] * 2
    stepping.close()


def test_defect_8_6_13_padding_holds_no_pages(engines):
    engine = engines["tape"]
    cache = engine.resource("kv")
    stepping = Stepping(engine)
    for rid in "abc":
        start(stepping, rid, ((1, 2), 3, SAMPLERS[0]))
    batch = stepping.step(a=0, b=0, c=0)
    assert batch.lease.bucket.rows == 4
    assert cache.num_free_pages == NUM_PAGES - 3
    stepping.step(a=0, b=0, c=0)
    assert cache.num_free_pages == NUM_PAGES - 3
    stepping.close()
    assert cache.num_free_pages == NUM_PAGES


def test_item_8_5_13_capturing_takes_no_pages_and_leaves_everything_at_rest(engines):
    engine = engines["tape"]
    assert engine.resource("kv").num_free_pages == NUM_PAGES
    assert engine.at_rest()


@pytest.mark.parametrize("mode", ["tape", "rerun"])
def test_item_8_5_12_planned_ahead_and_captured(engines, mode):
    """Every step is planned ahead into one slot while the other one's outputs are still unread."""
    wanted = {f"r{i}": ((3 + i, 1, 4), 5, sampler) for i, sampler in enumerate(SAMPLERS[:4])}
    eager = alone(engines["off"], wanted)
    engine = engines[mode]
    stepping = Stepping(engine)
    for rid, request in wanted.items():
        start(stepping, rid, request)
    for _ in range(5):
        batch = stepping.batch(**dict.fromkeys(wanted, 0))
        engine.prepare_inputs(batch)
        assert engine.pre_plan(batch)
        assert batch.lease is not None
        engine.exec(batch)
        assert batch.failed_requests == {}
        for row in batch.rows:
            stepping.states[row.request_id].advance(row.span)
        engine.check_stop(batch)
    assert tokens(stepping) == tokens(eager)
    stepping.close()
