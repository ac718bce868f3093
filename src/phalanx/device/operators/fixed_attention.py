"""Attention by a fixed plan, in plain torch: shapes are a bucket's, and lengths are read on the device.

Every key that a row's page table could hold is looked at, and what lies beyond its length is masked.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from phalanx.device.operators.base import PagedPlan


def fixed_mask(plan: PagedPlan, page_size: int, dtype: torch.dtype) -> Tensor:
    """What is added to the scores: 0 where a token may look, else a number that hides.

    `[rows, 1, tokens of a row, keys of a row]`; for a packed plan `[1, 1, tokens, rows * keys]`.
    """
    num_keys = plan.page_table.shape[1] * page_size
    device = plan.page_table.device
    keys = torch.arange(num_keys, device=device, dtype=torch.int32)
    if plan.row_span:
        place = torch.arange(plan.row_span, device=device, dtype=torch.int32)
        visible = _visible(plan.kv_lens[:, None], plan.row_span, place, causal=plan.causal)
        shown = keys < visible[..., None]
        return _added(shown, dtype)[:, None]
    rows = plan.kv_lens.shape[0]
    tokens = torch.arange(plan.slots.shape[0], device=device, dtype=torch.int32)
    row = torch.searchsorted(plan.query_starts[1:], tokens, right=True).clamp_(max=rows - 1)
    span = plan.query_starts[row + 1] - plan.query_starts[row]
    place = tokens - plan.query_starts[row]
    visible = _visible(plan.kv_lens[row], span, place, causal=plan.causal)
    own = row[:, None] == torch.arange(rows, device=device)
    shown = own[:, :, None] & (keys < visible[:, None, None])
    return _added(shown.flatten(1), dtype)[None, None]


def attend_fixed(
    q: Tensor, cache: tuple[Tensor, Tensor], plan: PagedPlan, mask: Tensor, scale: float
) -> Tensor:
    """Attention of `q` [T, H, D]; the result is [T, H * D]."""
    num_tokens, num_heads, head_dim = q.shape
    groups, _, span, _ = mask.shape
    pages = plan.page_table.reshape(-1)
    keys, values = (
        part.index_select(0, pages).view(groups, -1, *part.shape[2:]).transpose(1, 2)
        for part in cache
    )
    num_kv_heads = keys.shape[1]
    folded = num_heads // num_kv_heads
    # The heads that share keys become query positions, so that no key is repeated.
    queries = q.view(groups, span, num_kv_heads, folded, head_dim).permute(0, 2, 3, 1, 4)
    out = functional.scaled_dot_product_attention(
        queries.reshape(groups, num_kv_heads, folded * span, head_dim),
        keys,
        values,
        attn_mask=mask.repeat(1, 1, folded, 1) if span > 1 else mask,
        scale=scale,
    )
    by_token = out.view(groups, num_kv_heads, folded, span, head_dim).permute(0, 3, 1, 2, 4)
    return by_token.reshape(num_tokens, num_heads * head_dim)


def _visible(lens: Tensor, span: int | Tensor, place: Tensor, *, causal: bool) -> Tensor:
    """How many keys a token sees; padding sees one, so that its result is finite."""
    if not causal:
        return (lens + torch.zeros_like(place)).clamp(min=1)
    return (lens - span + place + 1).clamp(min=1)


def _added(shown: Tensor, dtype: torch.dtype) -> Tensor:
    # Finite, since a kernel may meet a block of keys that is hidden as a whole.
    hiding = torch.finfo(dtype).min / 2
    return torch.zeros(shown.shape, dtype=dtype, device=shown.device).masked_fill_(~shown, hiding)
