"""Attention within segments: each is as alone, and a label that nobody declared is an error."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from phalanx.errors import ConfigurationError
from phalanx.step.declaration import Segment, StepContext
from phalanx.step.lease import BucketKey, BufferClaim, SlotLease
from phalanx.step.resources.ragged_attention import RaggedAttentionSpec, RaggedStep
from tests.step.resources.cases import NODES, built

LAYOUTS = [[("a", 4)], [("a", 3), ("b", 3)], [("a", 2), ("b", 5), ("c", 2)], [("a", 2), ("a", 3)]]


def begun(step: RaggedStep, *, causal=False):
    (ragged,) = built(RaggedAttentionSpec("ragged", NODES, causal))
    ctx = StepContext((), "walk")
    assert ragged.admit(step, ctx).ok
    ctx.plan_results["ragged"] = ragged.plan(step, ctx)
    ragged.begin(step, ctx)
    return ragged


def random(tokens: int, heads: int, seed: int) -> torch.Tensor:
    return torch.randn(tokens, heads, 8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_segment_sees_itself_alone(layout, causal):
    ragged = begun(RaggedStep(tuple(Segment(*one) for one in layout)), causal=causal)
    total = sum(span for _, span in layout)
    q, k, v = random(total, 4, 1), random(total, 2, 2), random(total, 2, 3)
    mixed = ragged.attend(q, k, v).view(total, 4, 8)
    at = 0
    for _, span in layout:
        here = slice(at, at + span)
        parts = [q[here], k[here].repeat_interleave(2, 1), v[here].repeat_interleave(2, 1)]
        alone = functional.scaled_dot_product_attention(
            *(part.transpose(0, 1) for part in parts), is_causal=causal
        )
        torch.testing.assert_close(mixed[here], alone.transpose(0, 1), rtol=1e-5, atol=1e-5)
        at += span


def test_a_label_that_nobody_declared_raises_when_it_runs():
    ragged = begun(RaggedStep((Segment("a", 2),)))
    ragged.select("other")
    q = random(2, 1, 1)
    with pytest.raises(ConfigurationError, match=r"no sequences of label 'other'.*\['main'\]"):
        ragged.attend(q, q, q)


def test_labels_and_combined_labels_have_plans_of_their_own():
    step = RaggedStep(
        (Segment("a", 2), Segment("a", 3, "image"), Segment("b", 1)),
        combined_labels={"both": ("image", "main")},
    )
    ragged = begun(step)
    for label, tokens in (("main", 3), ("image", 3), ("both", 6)):
        ragged.select(label)
        q = random(tokens, 1, 1)
        assert ragged.attend(q, q, q).shape == (tokens, 8)


def test_a_wrong_number_of_tokens_is_refused():
    ragged = begun(RaggedStep((Segment("a", 2),)))
    q = random(3, 1, 1)
    with pytest.raises(ConfigurationError, match="3 queries for 2 declared tokens"):
        ragged.attend(q, q, q)


def test_segments_of_nothing_are_left_out():
    ragged = begun(RaggedStep((Segment("a", 0), Segment("b", 2), Segment("c", 0))))
    q = random(2, 1, 1)
    assert ragged.attend(q, q, q).shape == (2, 8)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("packed", "layout"),
    [(False, [("a", 3), ("b", 3)]), (True, [("a", 2), ("b", 4), ("c", 1)]), (True, [("a", 1)])],
    ids=str,
)
def test_a_captured_shape_gives_the_same(packed, layout, causal):
    (ragged,) = built(RaggedAttentionSpec("ragged", NODES, causal))
    ragged.claim_buffers(BufferClaim(num_slots=1, max_rows=4, max_tokens=12))
    lease = SlotLease(BucketKey("walk", 4, 12, packed=packed), 0)
    step, ctx = RaggedStep(tuple(Segment(*one) for one in layout)), StepContext((), "walk", lease)
    ctx.plan_results["ragged"] = ragged.plan(step, ctx)
    ragged.begin(step, ctx)
    real = sum(span for _, span in layout)
    q, k, v = random(12, 4, 1), random(12, 2, 2), random(12, 2, 3)
    mixed = ragged.attend(q, k, v)
    eager = begun(step, causal=causal).attend(q[:real], k[:real], v[:real])
    torch.testing.assert_close(mixed[:real], eager, rtol=1e-5, atol=1e-5)
    assert torch.isfinite(mixed).all()


@pytest.mark.parametrize(("packed", "combined"), [(False, {}), (True, {"both": ("main", "image")})])
def test_what_no_captured_shape_holds_is_refused(packed, combined):
    (ragged,) = built(RaggedAttentionSpec("ragged", NODES))
    lease = SlotLease(BucketKey("walk", 2, 4, packed=packed), 0)
    ragged.claim_buffers(BufferClaim(num_slots=1, max_rows=2, max_tokens=4))
    step = RaggedStep((Segment("a", 1), Segment("b", 3)), combined)
    with pytest.raises(ConfigurationError, match="a batched one takes one of 2 tokens a row"):
        ragged.plan(step, StepContext((), "walk", lease))
