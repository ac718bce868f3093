"""Naive float64 versions of the operators, and steps with paged caches to try them on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.device.operators.base import HeadLayout, PagedPlan


@dataclass(frozen=True)
class Step:
    """A plan, queries of its tokens, a filled cache, and each row's keys and values in order."""

    plan: PagedPlan
    heads: HeadLayout
    q: Tensor
    cache: tuple[Tensor, Tensor]
    keys: list[Tensor]
    values: list[Tensor]


def make_step(
    rows: list[tuple[int, int]],
    *,
    num_kv_heads: int = 2,
    group: int = 3,
    head_dim: int = 16,
    page_size: int = 4,
    dtype: torch.dtype = torch.float32,
    causal: bool = True,
    seed: int = 0,
) -> Step:
    """A step of `rows` of (span, visible tokens); single-token rows come first.

    Pages are handed out in a random order, and everything that no row owns is large: whoever
    looks at a key too many is found out.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = sorted(rows, key=lambda row: row[0] != 1)
    pages_of = [-(-length // page_size) for _, length in rows]
    num_pages = 1 + sum(pages_of)
    order = (torch.randperm(num_pages - 1, generator=generator) + 1).tolist()
    shape = (num_pages, page_size, num_kv_heads, head_dim)
    cache = tuple(torch.full(shape, 300.0, dtype=dtype) for _ in range(2))
    table = torch.zeros(len(rows), max(pages_of) + 1, dtype=torch.int32)
    slots: list[int] = []
    keys, values = [], []
    for row, (span, length) in enumerate(rows):
        mine = [order.pop() for _ in range(pages_of[row])]
        table[row, : len(mine)] = torch.tensor(mine, dtype=torch.int32)
        flat = [mine[i // page_size] * page_size + i % page_size for i in range(length)]
        slots += flat[length - span :]
        for part, kept in zip(cache, (keys, values), strict=True):
            content = torch.randn(length, num_kv_heads, head_dim, generator=generator).to(dtype)
            part.flatten(0, 1)[flat] = content
            kept.append(content)
    spans = tuple(span for span, _ in rows)
    lens = tuple(length for _, length in rows)
    starts = torch.tensor([0, *torch.tensor(spans).cumsum(0).tolist()], dtype=torch.int32)
    plan = PagedPlan(
        slots=torch.tensor(slots),
        query_starts=starts,
        page_table=table,
        kv_lens=torch.tensor(lens, dtype=torch.int32),
        spans=spans,
        lens=lens,
        num_single=sum(span == 1 for span in spans),
        causal=causal,
    )
    num_heads = num_kv_heads * group
    q = torch.randn(sum(spans), num_heads, head_dim, generator=generator).to(dtype)
    heads = HeadLayout(num_heads, num_kv_heads, head_dim)
    return Step(plan, heads, q, (cache[0], cache[1]), keys, values)


def attention(step: Step, scale: float) -> Tensor:
    """Each token by itself, in float64; the result is [T, H * D]."""
    out = []
    token = 0
    group = step.heads.num_heads // step.heads.num_kv_heads
    for row, (span, length) in enumerate(zip(step.plan.spans, step.plan.lens, strict=True)):
        keys = step.keys[row].double().repeat_interleave(group, dim=1)
        values = step.values[row].double().repeat_interleave(group, dim=1)
        for j in range(span):
            visible = length - span + j + 1 if step.plan.causal else length
            scores = torch.einsum("hd,khd->hk", step.q[token].double(), keys[:visible]) * scale
            out.append(torch.einsum("hk,khd->hd", scores.softmax(-1), values[:visible]).flatten())
            token += 1
    return torch.stack(out)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Each pair (i, i + D / 2) of [T, heads, D] turned by its angle, in float64."""
    half = x.shape[-1] // 2
    cos, sin = (table.double()[:, None, :] for table in rotary)
    first, second = x[..., :half].double(), x[..., half:].double()
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)
