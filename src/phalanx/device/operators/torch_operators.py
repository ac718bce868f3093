"""The operators in plain torch: correct on every device, and as fast on a CPU as torch alone allows.

Rows of one token are computed as one batch, with grouped query heads folded into the query length;
longer rows of equal shape share a call.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from phalanx.device.operators.base import HeadLayout, PackedWeight, PagedPlan
from phalanx.device.operators.fixed_attention import attend_fixed, fixed_mask
from phalanx.device.operators.int8_weight import OneDnnInt8Weight
from phalanx.device.operators.onednn_weight import OneDnnWeight, onednn_packs


@dataclass(frozen=True)
class _RowGroup:
    """Rows that share one attention call.

    `pages` are those of all rows; a slice where a single row's follow one another, so that nothing
    need be gathered. `mask` is True where a query may look, or of floats that are added to the scores.
    """

    tokens: slice | Tensor
    span: int
    pages: slice | Tensor
    num_keys: int
    mask: Tensor | None
    is_causal: bool


@dataclass(frozen=True)
class _PreparedPlan:
    plan: PagedPlan
    page_size: int
    groups: tuple[_RowGroup, ...]
    fixed_mask: Tensor
    """Of a fixed plan; empty for others."""


@dataclass(frozen=True)
class _RotationTables:
    """`cos` as it was given, and both tables widened to whole heads, the sine's first half negated."""

    cos: Tensor
    cosines: Tensor
    sines: Tensor


class TorchOperators:
    """`Operators` without anything but torch."""

    def __init__(self) -> None:
        # The layers of a step share one plan and one rotation, so what follows from them is made
        # once; held by identity.
        self._prepared: _PreparedPlan | None = None
        self._tables: _RotationTables | None = None

    @property
    def name(self) -> str:
        return "torch"

    @property
    def capturable(self) -> bool:
        return True

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return _rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        residual = residual.add_(x)
        return _rms_norm(residual, weight, eps), residual

    def rope_and_write(
        self,
        qkv: Tensor,
        heads: HeadLayout,
        rotary: tuple[Tensor, Tensor],
        cache: tuple[Tensor, Tensor],
        slots: Tensor,
    ) -> Tensor:
        num_rotated = heads.num_heads + heads.num_kv_heads
        split = qkv.view(qkv.shape[0], num_rotated + heads.num_kv_heads, heads.head_dim)
        tables = self._tables
        if tables is None or tables.cos is not rotary[0]:
            tables = _rotation_tables(rotary)
            self._tables = tables
        if heads.q_norm is None and heads.k_norm is None:
            rotated = _rotate(split[:, :num_rotated], tables)
            q, k = rotated[:, : heads.num_heads], rotated[:, heads.num_heads :]
        else:
            q, k = split[:, : heads.num_heads], split[:, heads.num_heads : num_rotated]
            if heads.q_norm is not None:
                q = _rms_norm(q, heads.q_norm, heads.eps)
            if heads.k_norm is not None:
                k = _rms_norm(k, heads.k_norm, heads.eps)
            q, k = _rotate(q, tables), _rotate(k, tables)
        k_cache, v_cache = cache
        k_cache.flatten(0, 1).index_copy_(0, slots, k)
        v_cache.flatten(0, 1).index_copy_(0, slots, split[:, num_rotated:])
        return q.contiguous()

    def paged_attention(
        self, q: Tensor, cache: tuple[Tensor, Tensor], plan: PagedPlan, scale: float
    ) -> Tensor:
        prepared = self._prepared
        page_size = cache[0].shape[1]
        if prepared is None or prepared.plan is not plan or prepared.page_size != page_size:
            prepared = _prepare(plan, page_size, q.dtype)
            self._prepared = prepared
        if plan.fixed:
            return attend_fixed(q, cache, plan, prepared.fixed_mask, scale)
        if len(prepared.groups) == 1 and len(plan.spans) == plan.num_single:
            return _attend(q, cache, prepared.groups[0], scale).flatten(1)
        out = torch.empty_like(q)
        for group in prepared.groups:
            out[group.tokens] = _attend(q[group.tokens], cache, group, scale)
        return out.flatten(1)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)

    def pack_weight(self, weight: Tensor, quantization: str | None) -> PackedWeight | None:
        if quantization == "int8":
            return OneDnnInt8Weight(weight)
        if weight.device.type == "cpu" and onednn_packs(weight.dtype):
            return OneDnnWeight(weight)
        return None


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    width = x.shape[-1]
    if x.numel() > 64 * width:
        return functional.rms_norm(x, (width,), weight, eps)
    # Next to its negative a row has mean zero, and its layer norm, one fused kernel, is its RMS norm.
    mirrored = torch.cat((x, -x), dim=-1)
    doubled = torch.cat((weight, weight))
    return functional.layer_norm(mirrored, (2 * width,), doubled, None, eps)[..., :width]


def _rotation_tables(rotary: tuple[Tensor, Tensor]) -> _RotationTables:
    cos, sin = rotary
    cosines = torch.cat((cos, cos), dim=-1).unsqueeze(1)
    sines = torch.cat((-sin, sin), dim=-1).unsqueeze(1)
    return _RotationTables(cos, cosines, sines)


def _rotate(x: Tensor, tables: _RotationTables) -> Tensor:
    """Each half times the cosine, plus the other half times the (signed) sine."""
    swapped = x.roll(tables.cos.shape[-1], dims=-1)
    return torch.addcmul(x * tables.cosines, swapped, tables.sines).to(x.dtype)


def _prepare(plan: PagedPlan, page_size: int, dtype: torch.dtype) -> _PreparedPlan:
    if plan.fixed:
        return _PreparedPlan(plan, page_size, (), fixed_mask(plan, page_size, dtype))
    groups: list[_RowGroup] = []
    if plan.num_single:
        groups.append(_single_rows(plan, page_size, dtype))
    by_shape: dict[tuple[int, int], list[int]] = {}
    for row in range(plan.num_single, len(plan.spans)):
        if plan.spans[row]:
            by_shape.setdefault((plan.spans[row], plan.lens[row]), []).append(row)
    starts = [0]
    for span in plan.spans:
        starts.append(starts[-1] + span)
    for (span, length), rows in by_shape.items():
        groups.append(_equal_rows(plan, page_size, (span, length), rows, starts))
    return _PreparedPlan(plan, page_size, tuple(groups), torch.empty(0))


def _single_rows(plan: PagedPlan, page_size: int, dtype: torch.dtype) -> _RowGroup:
    count = plan.num_single
    num_keys = max(plan.lens[:count])
    mask = None
    if min(plan.lens[:count]) != num_keys:
        positions = torch.arange(num_keys, device=plan.kv_lens.device, dtype=torch.int32)
        hidden = positions >= plan.kv_lens[:count, None]
        # Added to the scores, which is faster than a mask of booleans.
        mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
        mask = mask.masked_fill_(hidden, -torch.inf)[:, None, None, :]
    pages = plan.page_table[:count, : -(-num_keys // page_size)].reshape(-1)
    return _RowGroup(slice(0, count), 1, _run(pages, count), num_keys, mask, is_causal=False)


def _equal_rows(
    plan: PagedPlan, page_size: int, shape: tuple[int, int], rows: list[int], starts: list[int]
) -> _RowGroup:
    span, num_keys = shape
    device = plan.page_table.device
    num_pages = -(-num_keys // page_size)
    tokens: slice | Tensor
    if rows == list(range(rows[0], rows[0] + len(rows))):
        tokens = slice(starts[rows[0]], starts[rows[-1] + 1])
        pages = plan.page_table[rows[0] : rows[-1] + 1, :num_pages].reshape(-1)
    else:
        first = torch.tensor([starts[row] for row in rows], device=device)
        tokens = (first[:, None] + torch.arange(span, device=device)).reshape(-1)
        pages = plan.page_table[torch.tensor(rows, device=device), :num_pages].reshape(-1)
    mask = None
    if plan.causal and 1 < span < num_keys:
        last_visible = torch.arange(num_keys - span, num_keys, device=device)
        mask = torch.arange(num_keys, device=device) <= last_visible[:, None]
    is_causal = plan.causal and 1 < span == num_keys
    return _RowGroup(tokens, span, _run(pages, len(rows)), num_keys, mask, is_causal)


def _run(pages: Tensor, rows: int) -> slice | Tensor:
    """The pages as a slice where one row's follow one another (looked up on a CPU only)."""
    if rows > 1 or pages.device.type != "cpu":
        return pages
    numbers = pages.tolist()
    following = slice(numbers[0], numbers[0] + len(numbers))
    return following if numbers == list(range(following.start, following.stop)) else pages


def _attend(q: Tensor, cache: tuple[Tensor, Tensor], group: _RowGroup, scale: float) -> Tensor:
    num_tokens, num_heads, head_dim = q.shape
    rows = num_tokens // group.span
    keys, values = (_gather(part, group, rows) for part in cache)
    num_kv_heads = keys.shape[1]
    folded = num_heads // num_kv_heads
    if group.span == 1:
        # One query a row: the heads of a group become its query positions, so no key is repeated.
        queries = q.view(rows, num_kv_heads, folded, head_dim)
        out = functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=group.mask, scale=scale
        )
        return out.reshape(num_tokens, num_heads, head_dim)
    queries = q.view(rows, group.span, num_heads, head_dim).transpose(1, 2)
    if q.device.type == "cpu":
        # A CPU attends to many bfloat16 queries at a third of the speed of float32 ones.
        queries, keys, values = queries.float(), keys.float(), values.float()
    out = functional.scaled_dot_product_attention(
        queries,
        keys,
        values,
        attn_mask=group.mask,
        is_causal=group.is_causal,
        scale=scale,
        enable_gqa=folded > 1,
    )
    return out.transpose(1, 2).reshape(num_tokens, num_heads, head_dim).to(q.dtype)


def _gather(part: Tensor, group: _RowGroup, rows: int) -> Tensor:
    """The group's keys or values as [rows, KV, keys, D]."""
    if isinstance(group.pages, slice):
        pages = part[group.pages]
    else:
        pages = part.index_select(0, group.pages)
    by_row = pages.view(rows, -1, part.shape[2], part.shape[3])
    return by_row[:, : group.num_keys].transpose(1, 2)
