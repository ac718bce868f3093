"""Attention over the cache: the cursor that walks layers and labels, and its results."""

from __future__ import annotations

import pytest
import torch

from phalanx.device.cpu import CpuBackend
from phalanx.device.operators.base import HeadLayout
from phalanx.device.operators.torch_operators import TorchOperators
from phalanx.step.declaration import Segment, StepContext
from phalanx.step.resources.attention import AttentionSpec, AttentionStep
from phalanx.step.resources.base import BuildInfo
from phalanx.step.resources.kv_cache import KVConfig, KVSpec, KVStep

HEADS = HeadLayout(num_heads=2, num_kv_heads=1, head_dim=4)
LAYERS = 2
NODES = frozenset({"node"})


@pytest.fixture
def resources():
    config = KVConfig(LAYERS, 1, 4, num_pages=8, page_size=4, max_seq_len=64, dtype=torch.float32)
    cache = KVSpec("kv", NODES, config).build(BuildInfo(CpuBackend()))
    spec = AttentionSpec("attention", NODES, "kv", TorchOperators())
    assert spec.depends_on() == {"kv"}
    attention = spec.build(BuildInfo(CpuBackend(), {"kv": cache}))
    cache.ingest_request("a", None)
    return cache, attention


def begin(resources, *segments: Segment, **options) -> tuple[KVStep, StepContext]:
    """Admit and plan a step on both resources."""
    cache, attention = resources
    step, ctx = KVStep(segments, **options), StepContext(("a",), "walk")
    assert cache.admit(step, ctx).ok
    ctx.plan_results["kv"] = cache.plan(step, ctx)
    ctx.plan_results["attention"] = attention.plan(AttentionStep(), ctx)
    attention.begin(AttentionStep(), ctx)
    return step, ctx


def attend(attention, tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    qkv = torch.randn(tokens, 4 * HEADS.head_dim, generator=generator)
    rotary = (torch.ones(tokens, 2), torch.zeros(tokens, 2))
    return qkv, attention.attend(qkv, HEADS, rotary)


def naive(qkv: torch.Tensor) -> torch.Tensor:
    """Causal attention of a sequence without a cache; positions do not rotate."""
    q, k, v = qkv[:, :8].view(-1, 2, 4), qkv[:, 8:12], qkv[:, 12:]
    scores = torch.einsum("thd,sd->hts", q, k) / 2.0
    visible = torch.ones(len(qkv), len(qkv)).tril().bool()
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.einsum("hts,sd->thd", weights, v).flatten(1)


def test_each_call_writes_and_reads_the_next_layer(resources):
    cache, attention = resources
    begin(resources, Segment("a", 5))
    for layer in range(LAYERS):
        qkv, out = attend(attention, 5, seed=layer)
        torch.testing.assert_close(out, naive(qkv))
        slots = attention._plan.by_label["main"].slots
        assert torch.equal(cache.layer(layer)[0].flatten(0, 1)[slots, 0], qkv[:, 8:12])
    with pytest.raises(IndexError):
        attend(attention, 5)


def test_a_plan_resets_the_cursor(resources):
    cache, attention = resources
    step, ctx = begin(resources, Segment("a", 3))
    first, _ = attend(attention, 3, seed=1)
    cache.commit(step, ctx)
    begin(resources, Segment("a", 2))
    second, out = attend(attention, 2, seed=2)
    torch.testing.assert_close(out, naive(torch.cat([first, second]))[3:])


def test_a_label_is_selected_from_its_first_layer(resources):
    cache, attention = resources
    begin(resources, Segment("a", 2), Segment("a", 3, "image"))
    attend(attention, 2)
    attention.select("image")
    qkv, out = attend(attention, 3, seed=5)
    torch.testing.assert_close(out, naive(qkv))
    slots = attention._plan.by_label["image"].slots
    assert torch.equal(cache.layer(0)[1].flatten(0, 1)[slots, 0], qkv[:, 12:])
    begin(resources, Segment("a", 1))
    assert attend(attention, 1)[1].shape == (1, 8), "the next plan is at the default label again"


def test_a_label_that_was_not_declared_is_refused(resources):
    _, attention = resources
    begin(resources, Segment("a", 2))
    attention.select("image")
    with pytest.raises(KeyError, match="image"):
        attend(attention, 2)


def test_a_combined_label_attends_row_by_row(resources):
    _, attention = resources
    combined = {"both": ("image", "main")}
    begin(resources, Segment("a", 2), Segment("a", 3, "image"), combined_labels=combined)
    attention.select("both")
    qkv, out = attend(attention, 5, seed=6)
    torch.testing.assert_close(out, torch.cat([naive(qkv[:3]), naive(qkv[3:])]))
