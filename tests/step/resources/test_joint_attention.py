"""Attention to a segment's own tokens and to a context: each segment as if it were alone."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from phalanx.errors import ConfigurationError
from phalanx.step.declaration import Segment, StepContext
from phalanx.step.lease import BufferClaim
from phalanx.step.resources.joint_attention import JointAttentionSpec, JointStep
from phalanx.step.resources.kv_cache import KVSpec, KVStep
from tests.step.resources.cases import NODES, built, kv_config

KV, D = 2, 4
CONTEXTS = {("a", "main"): 5, ("a", "away"): 3, ("b", "main"): 5, ("c", "main"): 9}
LAYOUTS = [
    [("a", 4, "main")],
    [("a", 4, "main"), ("a", 4, "away")],
    [("a", 4, "main"), ("b", 4, "main")],
    [("a", 4, "main"), ("c", 2, "main"), ("b", 4, "main"), ("a", 4, "away")],
    [("c", 1, "main"), ("b", 7, "main"), ("a", 0, "main")],
]


class Contexts:
    """A cache with contexts, and attention to it."""

    def __init__(self) -> None:
        config = kv_config(num_kv_heads=KV)
        self.kv, self.joint = built(
            KVSpec("kv", NODES, config), JointAttentionSpec("joint", NODES, "kv")
        )
        self.stored = {}
        for rid in "abc":
            self.kv.ingest_request(rid, None)
        for (rid, label), length in CONTEXTS.items():
            self.write(rid, label, length)

    def write(self, rid: str, label: str, length: int) -> None:
        step = KVStep((Segment(rid, length, label),))
        ctx = StepContext((), "walk")
        assert self.kv.admit(step, ctx).ok
        slots = self.kv.plan(step, ctx).by_label[label].slots
        made = noise(2, 2, length, KV, D, seed=len(self.stored))
        for layer in range(2):
            for part, new in zip(self.kv.layer(layer), made[layer], strict=True):
                part.flatten(0, 1)[slots] = new
        before = self.stored.get((rid, label), made[:, :, :0])
        self.stored[rid, label] = torch.cat((before, made), dim=2)
        self.kv.commit(step, ctx)

    def begun(self, layout) -> StepContext:
        segments = tuple(Segment(*one) for one in layout)
        read = KVStep(tuple(Segment(rid, 0, label) for rid, _, label in reversed(layout)))
        ctx = StepContext((), "walk")
        assert self.kv.admit(read, ctx).ok
        ctx.plan_results["kv"] = self.kv.plan(read, ctx)
        ctx.plan_results["joint"] = self.joint.plan(JointStep(segments), ctx)
        self.joint.begin(JointStep(segments), ctx)
        self.kv.commit(read, ctx)
        return ctx


def noise(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def contexts():
    return Contexts()


@pytest.mark.parametrize("heads", [KV, 2 * KV])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_segment_sees_its_context_and_itself_and_nobody_else(contexts, layout, heads):
    contexts.begun(layout)
    total = sum(span for _, span, _ in layout)
    q = noise(total, heads, D, seed=100)
    for layer in range(2):
        k, v = noise(total, KV, D, seed=101 + layer), noise(total, KV, D, seed=103 + layer)
        mixed = contexts.joint.attend(q, k, v).view(total, heads, D)
        at = 0
        for rid, span, label in layout:
            here = slice(at, at + span)
            stored = contexts.stored[rid, label][layer]
            keys, values = (
                torch.cat((old, own[here])).repeat_interleave(heads // KV, 1).transpose(0, 1)
                for old, own in zip(stored, (k, v), strict=True)
            )
            alone = functional.scaled_dot_product_attention(q[here].transpose(0, 1), keys, values)
            torch.testing.assert_close(mixed[here], alone.transpose(0, 1), rtol=1e-5, atol=1e-5)
            at += span


def test_nothing_is_written(contexts):
    free = contexts.kv.num_free_pages
    before = [part.clone() for layer in range(2) for part in contexts.kv.layer(layer)]
    contexts.begun(LAYOUTS[3])
    q = noise(14, KV, D, seed=1)
    for _ in range(2):
        contexts.joint.attend(q, q, q)
    after = [part for layer in range(2) for part in contexts.kv.layer(layer)]
    assert all(map(torch.equal, before, after))
    assert contexts.kv.num_free_pages == free
    assert contexts.kv.stored_len("a") == 5


def test_an_unchanged_layout_is_not_planned_again_and_a_grown_context_is(contexts):
    first = contexts.begun(LAYOUTS[3]).plan_results["joint"]
    assert contexts.begun(LAYOUTS[3]).plan_results["joint"] is first
    contexts.write("b", "main", 2)
    assert contexts.begun(LAYOUTS[3]).plan_results["joint"] is not first
    test_a_segment_sees_its_context_and_itself_and_nobody_else(contexts, LAYOUTS[3], KV)


def test_a_context_that_is_empty_is_none(contexts):
    contexts.kv.ingest_request("d", None)
    contexts.begun([("d", 3, "main")])
    q = noise(3, KV, D, seed=1)
    alone = functional.scaled_dot_product_attention(*[q.transpose(0, 1)] * 3).transpose(0, 1)
    torch.testing.assert_close(contexts.joint.attend(q, q, q).view(3, KV, D), alone)


def test_a_wrong_number_of_tokens_is_refused(contexts):
    contexts.begun([("a", 4, "main")])
    q = noise(3, KV, D, seed=1)
    with pytest.raises(ConfigurationError, match="3 queries for the 4 tokens"):
        contexts.joint.attend(q, q, q)


def test_a_context_that_the_cache_was_not_asked_for_is_refused(contexts):
    ctx = StepContext((), "walk")
    read = KVStep((Segment("a", 0),))
    contexts.kv.admit(read, ctx)
    ctx.plan_results["kv"] = contexts.kv.plan(read, ctx)
    with pytest.raises(ConfigurationError, match="'a' has no segment 'away' on 'kv'"):
        contexts.joint.plan(JointStep((Segment("a", 4, "away"),)), ctx)


def test_it_says_that_it_is_not_captured(contexts):
    with pytest.raises(ConfigurationError, match="joint attention 'joint' cannot be captured"):
        contexts.joint.claim_buffers(BufferClaim(1, 1, 1))
