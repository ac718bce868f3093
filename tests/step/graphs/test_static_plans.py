"""Plans of captured steps: in buffers that never move, padded with what belongs to nobody."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.device.cpu import CpuBackend
from phalanx.errors import ConfigurationError
from phalanx.step.declaration import Segment, StepContext
from phalanx.step.lease import BucketKey, BufferClaim, SlotLease
from phalanx.step.resources.base import BuildInfo
from phalanx.step.resources.captured_sampling import sample_captured
from phalanx.step.resources.kv_cache import KVConfig, KVSpec, KVStep
from phalanx.step.resources.penalties import Penalties
from phalanx.step.resources.positions import PositionSpec, PositionStep
from phalanx.step.resources.sampler import Sampler, SamplerConfig, SamplerSpec, SamplerStep
from phalanx.step.resources.sampling import RowFilter

PAGE, PAGES_A_ROW, VOCAB = 4, 8, 29
NODES = frozenset({"n"})
INFO = BuildInfo(CpuBackend())
PACKED = BucketKey("w", 4, 12, packed=True)
ROWS = BucketKey("w", 4, 4)


def lease(bucket: BucketKey, slot: int = 0) -> SlotLease:
    return SlotLease(bucket, slot)


@pytest.fixture
def cache():
    config = KVConfig(1, 1, 2, 20, PAGE, PAGE * PAGES_A_ROW, torch.float32)
    made = KVSpec("kv", NODES, config).build(INFO)
    made.claim_buffers(BufferClaim(2, 4, 12))
    for rid in "abc":
        made.ingest_request(rid, None)
    return made


def planned(cache, step: KVStep, on: SlotLease | None):
    """Admitted, planned and committed."""
    rids = tuple(dict.fromkeys(segment.request_id for segment in step.segments))
    ctx = StepContext(rids, "w", on)
    assert cache.admit(step, ctx).ok
    plan = ctx.plan_results["kv"] = cache.plan(step, ctx)
    cache.begin(step, ctx)
    cache.commit(step, ctx)
    return plan.by_label


def step(*spans: tuple[str, int], **more) -> KVStep:
    return KVStep(tuple(Segment(*one) for one in spans), **more)


def test_a_packed_plan_is_the_plain_one_with_the_sink_behind_it(cache):
    planned(cache, step(("a", 5), ("b", 2)), None)
    plan = planned(cache, step(("a", 1), ("b", 4), ("c", 3)), lease(PACKED))["main"]
    assert (plan.fixed, plan.row_span) == (True, 0)
    pages = plan.page_table
    assert plan.query_starts.tolist() == [0, 1, 5, 8, 8]
    assert plan.kv_lens.tolist() == [6, 6, 3, 1]
    assert pages.shape == (4, PAGES_A_ROW)
    assert pages[3].tolist() == [0] * PAGES_A_ROW
    assert pages[:, 2:].sum() == 0
    assert plan.slots.tolist()[:5] == [
        pages[0, 1] * PAGE + 1,
        *(pages[1, 0] * PAGE + torch.arange(2, 4)).tolist(),
        *(pages[1, 1] * PAGE + torch.arange(2)).tolist(),
    ]
    assert plan.slots.tolist()[8:] == [0] * 4


def test_a_plan_of_one_token_a_row_says_so(cache):
    plan = planned(cache, step(("a", 1), ("b", 1)), lease(ROWS))["main"]
    assert plan.row_span == 1
    assert plan.kv_lens.tolist() == [1] * 4
    assert plan.query_starts.tolist() == [0, 1, 2, 3, 4]
    assert plan.slots.tolist()[2:] == [0, 0]


def test_buffers_of_a_slot_never_move_and_slots_do_not_share(cache):
    first = planned(cache, step(("a", 1)), lease(ROWS))["main"]
    before = [one.clone() for one in (first.slots, first.page_table, first.kv_lens)]
    other = planned(cache, step(("a", 1), ("b", 1)), lease(ROWS, 1))["main"]
    assert all(map(torch.equal, before, (first.slots, first.page_table, first.kv_lens)))
    again = planned(cache, step(("a", 1)), lease(BucketKey("w", 1, 1)))["main"]
    for name in ("slots", "page_table", "kv_lens", "query_starts"):
        assert getattr(again, name).data_ptr() == getattr(first, name).data_ptr()
        assert getattr(other, name).data_ptr() != getattr(first, name).data_ptr()
    assert len(again.slots) == 1


def test_a_capture_without_rows_plans_every_declared_label(cache):
    plans = planned(cache, KVStep((), labels=("main", "guide")), lease(ROWS))
    assert set(plans) == {"main", "guide"}
    assert plans["main"].slots.data_ptr() != plans["guide"].slots.data_ptr()
    assert plans["guide"].kv_lens.tolist() == [1] * 4
    assert cache.num_free_pages == 20


def test_a_combined_label_has_the_whole_shape_once_for_each_source(cache):
    segments = (
        Segment("a", 1, "text"),
        Segment("b", 1, "text"),
        Segment("a", 1, "image"),
        Segment("b", 1, "image"),
    )
    declared = KVStep(
        segments, combined_labels={"both": ("text", "image")}, labels=("text", "image")
    )
    plans = planned(cache, declared, lease(ROWS))
    both = plans["both"]
    assert both.slots.tolist() == [*plans["text"].slots.tolist(), *plans["image"].slots.tolist()]
    assert len(both.kv_lens) == 8
    assert both.query_starts.tolist() == list(range(9))
    with pytest.raises(ConfigurationError, match="combined label 'both' in a packed capture"):
        planned(cache, declared, lease(PACKED))


@pytest.mark.parametrize(
    ("wrong", "bucket", "why"),
    [
        (step(("a", 2)), ROWS, r"rows of \[2\] tokens in a capture of 4 rows of 1"),
        (step(("a", 5), ("b", 9)), PACKED, r"rows of \[5, 9\] tokens.*12 in all"),
        (step(("a", 9), max_context=8), PACKED, r"has 9 tokens, more than the 8.*max_context"),
    ],
)
def test_what_does_not_fit_its_shape_is_refused(cache, wrong, bucket, why):
    with pytest.raises(ConfigurationError, match=why):
        planned(cache, wrong, lease(bucket))


def test_a_bound_on_the_context_narrows_the_tables(cache):
    plan = planned(cache, step(("a", 3), max_context=6), lease(PACKED))["main"]
    assert plan.page_table.shape == (4, 2)


def test_a_shape_larger_than_the_claim_is_refused(cache):
    with pytest.raises(ConfigurationError, match="buffers were claimed for 5"):
        planned(cache, step(("a", 1)), lease(BucketKey("w", 5, 5)))


def test_positions_are_padded_label_by_label():
    made = PositionSpec("positions", NODES).build(INFO)
    made.claim_buffers(BufferClaim(1, 4, 12))
    made.ingest_request("a", None)
    made.ingest_request("b", None)
    first = PositionStep((Segment("a", 2), Segment("b", 3)))
    ctx = StepContext(("a", "b"), "w")
    assert made.plan(first, ctx).tolist() == [0, 1, 0, 1, 2]
    made.commit(first, ctx)
    leased = StepContext(("a", "b"), "w", lease(BucketKey("w", 4, 6, packed=True)))
    one = made.plan(first, leased)
    assert one.tolist() == [2, 3, 3, 4, 5, 0]
    two = PositionStep(
        (Segment("a", 1), Segment("b", 1, "x"), Segment("b", 2)), labels=("main", "x")
    )
    assert made.plan(two, leased).tolist() == [2, 3, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    assert made.plan(first, leased).data_ptr() == one.data_ptr()
    assert made.plan(PositionStep(()), leased).tolist() == [0] * 6


FILTERS = st.builds(
    RowFilter,
    temperature=st.sampled_from([0.0, 0.4, 1.0, 1.7]),
    top_k=st.sampled_from([-1, 1, 3, 20]),
    top_p=st.sampled_from([1.0, 0.9, 0.4]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
)
CONFIGS = st.builds(
    SamplerConfig,
    row=FILTERS,
    seed=st.integers(0, 1000),
    penalties=st.builds(
        Penalties,
        frequency=st.sampled_from([0.0, 0.5]),
        presence=st.sampled_from([0.0, 0.3]),
        repetition=st.sampled_from([1.0, 1.4]),
    ),
    logit_bias=st.sampled_from([(), ((3, 4.0), (5, -100.0))]),
    forbidden=st.just((1, 2, 4)),
    forbidden_until=st.sampled_from([0, 2]),
    prompt_ids=st.just((3, 7)),
)


def sampler(configs: list[SamplerConfig]) -> Sampler:
    made = SamplerSpec("sampler", NODES, VOCAB).build(INFO)
    made.claim_buffers(BufferClaim(2, 6, 6))
    for index, config in enumerate(configs):
        made.ingest_request(f"r{index}", config)
    return made


@settings(max_examples=40, deadline=None)
@given(configs=st.lists(CONFIGS, min_size=1, max_size=4), seed=st.integers(0, 99), data=st.data())
def test_captured_rows_draw_what_eager_rows_draw(configs, seed, data):
    """Over several steps, in which not every row samples, and on alternating slots."""
    eager, captured = sampler(configs), sampler(configs)
    generator = torch.Generator().manual_seed(seed)
    everyone = tuple(f"r{index}" for index in range(len(configs)))
    for turn in range(3):
        chosen = tuple(rid for rid in everyone if data.draw(st.booleans()))
        logits = torch.randn(6, VOCAB, generator=generator) * 3
        declared = SamplerStep(chosen)
        plain = StepContext(everyone, "w")
        plain.plan_results["sampler"] = eager.plan(declared, plain)
        eager.begin(declared, plain)
        at = [everyone.index(rid) for rid in chosen]
        expected = eager.sample(logits[at]) if chosen else torch.empty(0, dtype=torch.int64)
        eager.commit(declared, plain)
        leased = StepContext(everyone, "w", lease(BucketKey("w", 6, 6), turn % 2))
        rows = leased.plan_results["sampler"] = captured.plan(declared, leased)
        captured.begin(declared, leased)
        sample_captured(rows, logits, None)
        assert rows.tokens[at].tolist() == expected.tolist()
        captured.commit(declared, leased)


def test_a_captured_token_is_counted_for_the_row_that_sampled_it():
    """Only the second row samples: its penalty, and nobody else's, is for its own token."""
    penalty = Penalties(frequency=1.5)
    made = sampler(
        [SamplerConfig(RowFilter(0.0), 1, penalty), SamplerConfig(RowFilter(0.0), 2, penalty)]
    )
    logits = torch.zeros(2, VOCAB)
    logits[0, 3], logits[1, 4] = 2.0, 2.0
    logits[:, 5] = 1.0
    found = []
    for chosen in (("r1",), ("r0", "r1")):
        step = SamplerStep(chosen)
        ctx = StepContext(("r0", "r1"), "w", lease(BucketKey("w", 2, 2)))
        ctx.plan_results["sampler"] = made.plan(step, ctx)
        made.begin(step, ctx)
        found.append(made.sample(logits).tolist())
        made.commit(step, ctx)
    assert found[0][1] == 4
    assert found[1] == [3, 5]


def test_a_greedy_capture_looks_for_the_most_likely_token_and_counts_it():
    made = sampler([SamplerConfig(RowFilter(0.0), 1)])
    step = SamplerStep(("r0",), greedy_only=True)
    ctx = StepContext(("r0",), "w", lease(BucketKey("w", 2, 2)))
    ctx.plan_results["sampler"] = made.plan(step, ctx)
    made.begin(step, ctx)
    logits = torch.zeros(2, VOCAB)
    logits[0, 5], logits[0, 6] = 1.0, 2.0
    allowed = torch.ones(2, VOCAB, dtype=torch.bool)
    allowed[0, 6] = False
    assert made.sample(logits, allowed).tolist()[0] == 5
    assert made.sample(logits).tolist()[0] == 6
    made.commit(step, ctx)
    with pytest.raises(ValueError, match="for 2 sampled rows"):
        made.begin(step, ctx)
        made.sample(logits[:1])
