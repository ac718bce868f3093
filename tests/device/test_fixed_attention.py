"""Attention by a plan of fixed sizes is attention by the same rows' plain plan."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from phalanx.device.cpu import CpuBackend
from phalanx.device.operators.base import PagedPlan
from phalanx.device.operators.torch_operators import TorchOperators

PAGE, HEADS, GROUPS, DIM = 4, 4, 2, 8


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def cache(num_pages: int = 32, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    shape = (num_pages, PAGE, GROUPS, DIM)
    return tuple(torch.randn(shape, generator=generator).to(dtype) for _ in range(2))


def plain(spans: list[int], lens: list[int], pages: list[list[int]], causal: bool) -> PagedPlan:
    table = np.zeros((len(spans), max(map(len, pages))), dtype=np.int32)
    for row, numbers in enumerate(pages):
        table[row, : len(numbers)] = numbers
    singles = next((i for i, span in enumerate(spans) if span != 1), len(spans))
    return PagedPlan(
        slots=torch.zeros(sum(spans), dtype=torch.int64),
        query_starts=torch.tensor([0, *np.cumsum(spans)], dtype=torch.int32),
        page_table=torch.from_numpy(table),
        kv_lens=torch.tensor(lens, dtype=torch.int32),
        spans=tuple(spans),
        lens=tuple(lens),
        num_single=singles,
        causal=causal,
    )


def fixed(of: PagedPlan, rows: int, tokens: int, width: int, row_span: int) -> PagedPlan:
    real = len(of.spans)
    table = torch.zeros((rows, width), dtype=torch.int32)
    table[:real, : of.page_table.shape[1]] = of.page_table
    starts = torch.full((rows + 1,), sum(of.spans), dtype=torch.int32)
    starts[: real + 1] = of.query_starts
    lens = torch.ones(rows, dtype=torch.int32)
    lens[:real] = of.kv_lens
    slots = torch.zeros(tokens, dtype=torch.int64)
    return PagedPlan(slots, starts, table, lens, (), (), 0, of.causal, True, row_span)


def compare(of: PagedPlan, rows: int, tokens: int, row_span: int, dtype=torch.float32) -> None:
    operators, store = TorchOperators(), cache(dtype=dtype)
    q = torch.randn(tokens, HEADS, DIM, generator=torch.Generator().manual_seed(5)).to(dtype)
    used = sum(of.spans)
    expected = operators.paged_attention(q[:used].contiguous(), store, of, 0.3)
    got = operators.paged_attention(q, store, fixed(of, rows, tokens, 9, row_span), 0.3)
    assert got.shape == (tokens, HEADS * DIM)
    assert got.isfinite().all(), "padding too"
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(got[:used], expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [True, False])
def test_one_token_a_row(dtype, causal):
    pages = [[5, 2], [7], [9, 8, 1, 30]]
    compare(plain([1, 1, 1], [6, 1, 14], pages, causal), 4, 4, 1, dtype)


@pytest.mark.parametrize("causal", [True, False])
def test_equally_many_tokens_a_row(causal):
    compare(plain([3, 3], [3, 10], [[4], [6, 7, 3]], causal), 4, 12, 3)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_any_lengths(causal, dtype):
    pages = [[5, 2], [7], [9, 8, 1, 30], [3]]
    compare(plain([1, 1, 7, 2], [6, 1, 14, 2], pages, causal), 6, 16, 0, dtype)


def test_a_full_shape_has_no_padding():
    compare(plain([2, 5], [2, 5], [[4], [6, 7]], True), 2, 7, 0)


def test_only_the_tensors_say_what_is_in_a_fixed_plan():
    """Replayed on a tape, it follows what the plan's tensors hold then."""
    operators, store = TorchOperators(), cache()
    first = fixed(plain([1, 1], [6, 3], [[5, 2], [7]], True), 2, 2, 9, 1)
    second = plain([1, 1], [13, 9], [[11, 12, 13, 14], [21, 22, 23]], True)
    graph = CpuBackend(capture="tape").create_graph()
    with torch.inference_mode():
        q = torch.randn(2, HEADS, DIM)
        out = graph.capture(lambda: {"y": operators.paged_attention(q, store, first, 0.3)})["y"]
        other = fixed(second, 2, 2, 9, 1)
        first.page_table.copy_(other.page_table)
        first.kv_lens.copy_(other.kv_lens)
        graph.replay()
        expected = TorchOperators().paged_attention(q, store, second, 0.3)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_what_lies_beyond_a_row_does_not_count():
    operators, store = TorchOperators(), cache()
    plan = fixed(plain([1, 2], [6, 3], [[5, 2], [7]], True), 3, 6, 9, 0)
    q = torch.randn(6, HEADS, DIM)
    before = operators.paged_attention(q, store, plan, 0.3)[:3].clone()
    for part in store:
        part[0] += 100.0
        part[2, 2:] -= 50.0
        part[7, 3:] += 50.0
    after = TorchOperators().paged_attention(q, store, plan, 0.3)[:3]
    torch.testing.assert_close(before, after, rtol=1e-6, atol=1e-6)
