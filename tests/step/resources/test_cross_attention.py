"""Attention to a context that was written once, by rows that ask in any step."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from phalanx.device.operators.torch_operators import TorchOperators
from phalanx.errors import ConfigurationError
from phalanx.step.declaration import Segment, StepContext
from phalanx.step.lease import BucketKey, BufferClaim, SlotLease
from phalanx.step.resources.cross_attention import CrossAttentionSpec, CrossAttentionStep
from phalanx.step.resources.kv_cache import KVSpec, KVStep
from tests.step.resources.cases import NODES, built, kv_config

LENGTHS = {"a": 5, "b": 9, "c": 1}
H, D = 2, 4


def noise(rid: str, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(ord(rid[0])))


class Contexts:
    """A cache with contexts, and cross-attention to it."""

    def __init__(self) -> None:
        specs = (
            KVSpec("kv", NODES, kv_config()),
            CrossAttentionSpec("cross", NODES, "kv", TorchOperators()),
        )
        self.kv, self.cross = built(*specs)
        self.keys, self.values = {}, {}

    def begun(
        self, kv: KVStep, cross: CrossAttentionStep, lease: SlotLease | None = None
    ) -> StepContext:
        ctx = StepContext((), "walk", lease)
        assert self.kv.admit(kv, ctx).ok
        ctx.plan_results["kv"] = self.kv.plan(kv, ctx)
        ctx.plan_results["cross"] = self.cross.plan(cross, ctx)
        self.kv.begin(kv, ctx)
        self.cross.begin(cross, ctx)
        return ctx

    def write(self, **lengths: int) -> None:
        """One step that writes these contexts, in both layers."""
        for rid, length in lengths.items():
            self.kv.ingest_request(rid, None)
            self.keys[rid] = noise(rid, 2, length, 1, D)
            self.values[rid] = noise(rid * 2, 2, length, 1, D) + ord(rid)
        kv = KVStep(tuple(Segment(rid, span, "context") for rid, span in lengths.items()))
        ctx = self.begun(kv, CrossAttentionStep())
        for layer in range(2):
            keys = torch.cat([self.keys[rid][layer] for rid in lengths])
            self.cross.write(keys, torch.cat([self.values[rid][layer] for rid in lengths]))
        self.kv.commit(kv, ctx)

    def reading(self, **spans: int) -> StepContext:
        kv = KVStep(tuple(Segment(rid, 0, "context") for rid in reversed(spans)))
        return self.begun(
            kv, CrossAttentionStep(tuple(Segment(rid, span) for rid, span in spans.items()))
        )

    def expected(self, rid: str, q: torch.Tensor, layer: int) -> torch.Tensor:
        k, v = (
            part[rid][layer].transpose(0, 1).expand(H, -1, -1) for part in (self.keys, self.values)
        )
        return functional.scaled_dot_product_attention(q.transpose(0, 1), k, v).transpose(0, 1)


@pytest.fixture
def contexts():
    made = Contexts()
    made.write(**LENGTHS)
    return made


@pytest.mark.parametrize(
    "spans", [{"a": 1, "b": 1, "c": 1}, {"b": 3, "a": 2}, {"c": 1, "a": 4, "b": 1}, {"b": 7}]
)
def test_every_token_sees_the_whole_context_of_its_row(contexts, spans):
    contexts.reading(**spans)
    q = noise("q", sum(spans.values()), H, D)
    for layer in range(2):
        mixed = contexts.cross.attend(q).view(-1, H, D)
        at = 0
        for rid, span in spans.items():
            expected = contexts.expected(rid, q[at : at + span], layer)
            torch.testing.assert_close(mixed[at : at + span], expected, rtol=1e-5, atol=1e-5)
            at += span


def test_a_context_can_be_written_and_read_in_one_step(contexts):
    contexts.kv.ingest_request("d", None)
    kv = KVStep((Segment("d", 6, "context"), Segment("a", 0, "context")))
    contexts.begun(kv, CrossAttentionStep((Segment("d", 2), Segment("a", 1))))
    contexts.keys["d"], contexts.values["d"] = noise("d", 2, 6, 1, D), noise("e", 2, 6, 1, D)
    q = noise("q", 3, H, D)
    for layer in range(2):
        contexts.cross.write(contexts.keys["d"][layer], contexts.values["d"][layer])
        mixed = contexts.cross.attend(q).view(-1, H, D)
        torch.testing.assert_close(mixed[:2], contexts.expected("d", q[:2], layer))
        torch.testing.assert_close(mixed[2:], contexts.expected("a", q[2:], layer))


def test_nothing_that_is_read_grows(contexts):
    free = contexts.kv.num_free_pages
    for _ in range(5):
        contexts.reading(a=2, b=1)
    assert contexts.kv.num_free_pages == free
    assert contexts.kv.stored_len("a", "context") == 5


def plans(ctx: StepContext):
    return ctx.plan_results["cross"].by_label["main"]


def test_an_unchanged_layout_is_not_planned_again(contexts):
    first = plans(contexts.reading(a=1, b=1))
    assert plans(contexts.reading(a=1, b=1)) is first
    assert plans(contexts.reading(b=1, a=1)) is not first, "other rows"
    again = plans(contexts.reading(a=1, b=1))
    assert plans(contexts.reading(a=2, b=1)) is not again, "other spans"


@pytest.mark.parametrize("change", ["longer", "other pages", "another request"])
def test_a_changed_context_is_planned_again(contexts, change):
    first = plans(contexts.reading(a=1, b=1))
    if change == "longer":
        kv = KVStep((Segment("a", 1, "context"),))
        contexts.kv.commit(kv, contexts.begun(kv, CrossAttentionStep()))
    elif change == "other pages":
        ctx = contexts.reading(a=1)
        contexts.kv.unadmit(KVStep(()), ctx)
        contexts.kv.remove_request("a")
        contexts.kv.ingest_request("x", None)
        contexts.write(x=3)
        contexts.write(a=5)
    else:
        contexts.kv.remove_request("b")
        contexts.write(b=9)
        contexts.kv.remove_request("a")
        contexts.write(a=4)
    again = plans(contexts.reading(a=1, b=1))
    assert again is not first
    q = noise("q", 2, H, D)
    mixed = contexts.cross.attend(q).view(-1, H, D)
    if change != "longer":
        torch.testing.assert_close(mixed[:1], contexts.expected("a", q[:1], 0))
    torch.testing.assert_close(mixed[1:], contexts.expected("b", q[1:], 0))


def test_an_empty_context_reads_the_sink_and_gives_zeros(contexts):
    contexts.kv.ingest_request("empty", None)
    contexts.kv.layer(0)[1][0] = 77.0
    ctx = contexts.reading(a=1, empty=2, b=1)
    paged = plans(ctx).paged
    assert paged.page_table[1].tolist()[0] == 0
    assert paged.lens[1] == 1
    q = noise("q", 4, H, D)
    mixed = contexts.cross.attend(q).view(-1, H, D)
    assert not mixed[1:3].any()
    torch.testing.assert_close(mixed[:1], contexts.expected("a", q[:1], 0))
    torch.testing.assert_close(mixed[3:], contexts.expected("b", q[3:], 0))


def test_a_row_without_a_context_row_is_refused(contexts):
    kv = KVStep((Segment("a", 0, "context"),))
    with pytest.raises(ConfigurationError, match=r"'b' has no segment 'context' on 'kv'"):
        contexts.begun(kv, CrossAttentionStep((Segment("a", 1), Segment("b", 1))))


def test_labels_may_read_contexts_of_their_own(contexts):
    contexts.kv.ingest_request("g", None)
    kv = KVStep((Segment("g", 4, "context"), Segment("g", 2, "null")))
    cross = CrossAttentionStep(
        (Segment("g", 1), Segment("g", 1, "guide")),
        contexts={"guide": "null"},
        combined_labels={"both": ("main", "guide")},
    )
    contexts.begun(kv, cross)
    ones = torch.ones(4, 1, D)
    contexts.cross.write(ones, ones)
    contexts.cross.select("guide")
    contexts.cross.write(ones[:2], 3 * ones[:2])
    contexts.cross.select("both")
    mixed = contexts.cross.attend(torch.ones(2, H, D))
    assert mixed[:, 0].tolist() == pytest.approx([1.0, 3.0])


def leased(contexts, rows: int, slot: int = 0, packed: bool = False, **spans: int) -> StepContext:
    tokens = 6 if packed else rows * max(spans.values(), default=1)
    lease = SlotLease(BucketKey("walk", rows, tokens, packed=packed), slot)
    kv = KVStep(tuple(Segment(rid, 0, "context") for rid in spans), labels=("context",))
    cross = CrossAttentionStep(tuple(Segment(rid, span) for rid, span in spans.items()))
    return contexts.begun(kv, cross, lease)


@pytest.fixture
def captured(contexts):
    claim = BufferClaim(num_slots=2, max_rows=4, max_tokens=8)
    contexts.kv.claim_buffers(claim)
    contexts.cross.claim_buffers(claim)
    contexts.kv.ingest_request("empty", None)
    contexts.kv.layer(0)[1][0] = 77.0
    return contexts


@pytest.mark.parametrize(
    ("packed", "spans"),
    [
        (False, {"a": 1, "b": 1}),
        (False, {"b": 2, "c": 2, "a": 2}),
        (False, {"empty": 1, "a": 1}),
        (True, {"a": 3, "b": 1}),
        (True, {"c": 2, "empty": 1, "b": 3}),
    ],
)
def test_a_captured_shape_gives_the_same_and_zeros_for_padding(captured, packed, spans):
    ctx = leased(captured, 4, packed=packed, **spans)
    plan = plans(ctx)
    assert plan.paged.fixed
    q = noise("q", plan.paged.slots.shape[0], H, D)
    mixed = captured.cross.attend(q).view(-1, H, D)
    at = 0
    for rid, span in spans.items():
        here = mixed[at : at + span]
        if rid == "empty":
            assert not here.any()
        else:
            expected = captured.expected(rid, q[at : at + span], 0)
            torch.testing.assert_close(here, expected, rtol=1e-5, atol=1e-5)
        at += span
    assert not mixed[at:].any()


def test_defect_8_6_13_padding_rows_take_no_page(captured):
    free = captured.kv.num_free_pages
    plan = plans(leased(captured, 4, a=1))
    assert plan.paged.page_table[1:].eq(0).all()
    assert captured.kv.num_free_pages == free


def test_a_slot_is_written_again_only_for_another_layout(captured):
    first = plans(leased(captured, 4, a=1, b=1))
    table = first.paged.page_table
    table[3] = 99
    second = plans(leased(captured, 4, a=1, b=1))
    assert second.paged.page_table.data_ptr() == table.data_ptr()
    assert second.paged.page_table[3, 0] == 99, "an unchanged layout was written again"
    assert second.paged is not first.paged
    assert plans(leased(captured, 4, slot=1, a=1, b=1)).paged.page_table[3, 0] == 0
    third = plans(leased(captured, 4, b=1, a=1))
    assert third.paged.page_table.data_ptr() == table.data_ptr()
    assert third.paged.page_table[3, 0] == 0


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ({"a": 1, "b": 2}, "a row of 1 tokens in a capture of 2"),
        ({"a": 1}, "more than the 1 pages"),
    ],
)
def test_what_a_captured_shape_cannot_hold_is_refused(captured, spans, message):
    lease = SlotLease(BucketKey("walk", 2, 2 * max(spans.values())), 0)
    kv = KVStep(tuple(Segment(rid, 0, "context") for rid in spans), labels=("context",))
    segments = tuple(Segment(rid, span) for rid, span in spans.items())
    with pytest.raises(ConfigurationError, match=message):
        captured.begun(kv, CrossAttentionStep(segments, max_context=4), lease)
