"""Both implementations of the operators against naive float64 versions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phalanx.device.operators.base import HeadLayout
from tests.operators import reference

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
examples = settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 3, 4, 7])
@pytest.mark.parametrize("head_dim", [8, 64, 128, 20])
def test_attention_of_single_rows(operators, dtype, group, head_dim):
    rows = [(1, n) for n in (1, 3, 4, 5, 8, 9, 40)]
    step = reference.make_step(rows, group=group, head_dim=head_dim, dtype=dtype)
    scale = head_dim**-0.5
    out = operators.paged_attention(step.q, step.cache, step.plan, scale)
    close(out, reference.attention(step, scale), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 3, 4, 7])
@pytest.mark.parametrize("causal", [True, False])
def test_attention_of_mixed_rows(operators, dtype, group, causal):
    rows = [(1, 6), (1, 17), (5, 5), (5, 5), (4, 12), (7, 9), (2, 2), (5, 5), (33, 70), (1, 1)]
    step = reference.make_step(rows, group=group, dtype=dtype, causal=causal)
    out = operators.paged_attention(step.q, step.cache, step.plan, 0.25)
    close(out, reference.attention(step, 0.25), dtype)


@given(
    rows=st.lists(
        st.tuples(st.integers(1, 9), st.integers(0, 20)).map(lambda r: (r[0], r[0] + r[1])),
        min_size=1,
        max_size=5,
    ),
    num_kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 5]),
    page_size=st.sampled_from([1, 4, 16]),
    causal=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
@examples
def test_attention_of_any_rows(operators, rows, num_kv_heads, group, page_size, causal, dtype):
    step = reference.make_step(
        rows,
        num_kv_heads=num_kv_heads,
        group=group,
        page_size=page_size,
        causal=causal,
        dtype=dtype,
    )
    out = operators.paged_attention(step.q, step.cache, step.plan, 0.3)
    close(out, reference.attention(step, 0.3), dtype)


def test_attention_of_large_scores_stays_finite(operators):
    step = reference.make_step([(1, 30), (6, 30)])
    q = step.q * 1000
    out = operators.paged_attention(q, step.cache, step.plan, 1.0)
    assert out.isfinite().all()


def test_a_row_does_not_depend_on_the_batch_around_it(operators):
    """Bit by bit: an engine promises the same output alone and in a batch."""
    step = reference.make_step([(1, 13), (1, 29), (1, 5)], page_size=16)
    together = operators.paged_attention(step.q, step.cache, step.plan, 0.25)
    for row in range(3):
        plan = step.plan
        alone = type(plan)(
            slots=plan.slots[row : row + 1],
            query_starts=torch.tensor([0, 1], dtype=torch.int32),
            page_table=plan.page_table[row : row + 1],
            kv_lens=plan.kv_lens[row : row + 1],
            spans=(1,),
            lens=plan.lens[row : row + 1],
            num_single=1,
        )
        out = operators.paged_attention(step.q[row : row + 1], step.cache, alone, 0.25)
        torch.testing.assert_close(out[0], together[row], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), [(1, 576), (3, 20), (9, 64)])
def test_rms_norm(operators, dtype, tokens, width):
    x, weight = torch.randn(tokens, width).to(dtype), torch.rand(width).to(dtype)
    close(operators.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_zeros_and_of_tiny_values(operators, dtype):
    x = torch.stack((torch.zeros(24), torch.full((24,), 1e-12))).to(dtype)
    weight = torch.ones(24, dtype=dtype)
    close(operators.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm(operators, dtype):
    x, residual = torch.randn(5, 72).to(dtype), torch.randn(5, 72).to(dtype)
    weight = torch.rand(72).to(dtype)
    total = x.double() + residual.double()
    normed, summed = operators.add_rms_norm(x, residual, weight, 1e-5)
    close(summed, total, dtype)
    close(normed, reference.rms_norm(total, weight, 1e-5), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 8), (7, 1, 20)])
@pytest.mark.parametrize("normed", [False, True])
def test_rope_and_write(operators, dtype, heads, kv_heads, head_dim, normed):
    tokens, num_pages, page_size = 6, 3, 4
    norms = [torch.rand(head_dim).to(dtype) + 0.5 if normed else None for _ in range(2)]
    layout = HeadLayout(heads, kv_heads, head_dim, *norms, eps=1e-5)
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim).to(dtype)
    angles = torch.randn(tokens, head_dim // 2) * 5
    rotary = (angles.cos(), angles.sin())
    cache = tuple(torch.zeros(num_pages, page_size, kv_heads, head_dim).to(dtype) for _ in "kv")
    slots = torch.tensor([4, 9, 5, 11, 0, 7])
    q = operators.rope_and_write(qkv, layout, rotary, cache, slots)

    parts = qkv.double().view(tokens, -1, head_dim).split([heads, kv_heads, kv_heads], dim=1)
    queries, keys = parts[0], parts[1]
    if normed:
        queries = reference.rms_norm(queries, norms[0], 1e-5)
        keys = reference.rms_norm(keys, norms[1], 1e-5)
    close(q, reference.rotate(queries, rotary), dtype)
    written = [part.flatten(0, 1) for part in cache]
    close(written[0][slots], reference.rotate(keys, rotary), dtype)
    assert torch.equal(written[1][slots], parts[2].to(dtype))
    untouched = torch.ones(num_pages * page_size, dtype=torch.bool)
    untouched[slots] = False
    assert not any(part[untouched].any() for part in written)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 36, 1536])
def test_silu_mul(operators, dtype, width):
    gate_up = (torch.randn(4, 2 * width) * 4).to(dtype)
    gate_up[0, :4] = torch.tensor([-200.0, 200.0, 0.0, -90.0])
    gate, up = gate_up.double().chunk(2, dim=-1)
    close(operators.silu_mul(gate_up), gate * gate.sigmoid() * up, dtype)
