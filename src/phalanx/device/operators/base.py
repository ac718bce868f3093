"""The few fused operators that decide a step's speed, and packed weights, behind one interface.

Shapes: T tokens of a step, R rows (requests), H query heads, KV key-value heads (H is a multiple of
KV), D head size, P pages a row, page_size tokens a page. A cache is `[pages, page_size, KV, D]`,
contiguous, in the parameters' dtype; page 0 is the sink that no request owns. What it holds is finite
from the start (zeros): an implementation may read a masked position and weigh it with nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class PagedPlan:
    """Where a step's tokens are written and what each row may attend to.

    Rows are laid out one after another: row r holds tokens `query_starts[r]` to
    `query_starts[r+1]`, the newest of its `kv_lens[r]` visible tokens. The first `num_single` rows
    have exactly one token. `spans` and `lens` are host copies of the row lengths. Token j of a row
    of n tokens sees `kv_lens - n + j + 1` tokens (causal), or all `kv_lens` where `causal` is False.
    """

    slots: Tensor
    """int64 [T]: flat cache position (page * page_size + offset) that each token is written to."""
    query_starts: Tensor
    """int32 [R+1]."""
    page_table: Tensor
    """int32 [R, P], padded with the sink page."""
    kv_lens: Tensor
    """int32 [R]."""
    spans: tuple[int, ...]
    lens: tuple[int, ...]
    num_single: int
    causal: bool = True
    fixed: bool = False
    """Of a captured step: sizes are those of a bucket, and only the tensors say what is in it.

    `spans`, `lens` and `num_single` are of the first step and must not be read. Rows beyond the
    step's read the sink; their results mean nothing, and are finite.
    """
    row_span: int = 0
    """Of a fixed plan: the tokens of every row, or 0 where `query_starts` says."""


@dataclass(frozen=True)
class HeadLayout:
    """How a fused projection's output splits into heads, and the norms some models put on them.

    `q_norm` and `k_norm` are RMS-norm weights of size D (Qwen3) or None; `eps` belongs to them.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 1e-6


QUANTIZATIONS = (None, "int8")


class PackedWeight(Protocol):
    """A linear layer's weight `[out, in]` in the form that one kernel reads fastest.

    Immutable and private to its process: after a weight update it is packed again.
    """

    @property
    def num_bytes(self) -> int:
        """Memory that the packed form holds."""
        ...

    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`x @ weight.T + bias` of `x` [T, in], in the dtype of `x`."""
        ...

    def dense(self) -> Tensor:
        """The plain matrix, in the dtype it was packed from; exact unless quantized."""
        ...


class Operators(Protocol):
    """One implementation of the operators; all compute in at least the precision of `x`."""

    @property
    def name(self) -> str: ...

    @property
    def capturable(self) -> bool:
        """Whether fixed plans are taken, and every operation is seen by a recording graph."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMS norm over the last dimension of `x` [T, width], the mean in float32."""
        ...

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """`residual + x`, normed, and the sum itself; `residual` may be overwritten with the sum."""
        ...

    def rope_and_write(
        self,
        qkv: Tensor,
        heads: HeadLayout,
        rotary: tuple[Tensor, Tensor],
        cache: tuple[Tensor, Tensor],
        slots: Tensor,
    ) -> Tensor:
        """Rotate queries and keys, write keys and values into the cache, return queries [T, H, D].

        `qkv` is [T, (H + 2 KV) D], queries first. `rotary` is (cos, sin), each float32 [T, D / 2],
        for the half-split rotation that Llama's Hugging Face checkpoints use.
        """
        ...

    def paged_attention(
        self, q: Tensor, cache: tuple[Tensor, Tensor], plan: PagedPlan, scale: float
    ) -> Tensor:
        """Attention of `q` [T, H, D] over the cache by `plan`; the result is [T, H * D]."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """`silu(gate) * up` of `gate_up` [T, 2 width], gate first; the result is [T, width]."""
        ...

    def pack_weight(self, weight: Tensor, quantization: str | None) -> PackedWeight | None:
        """A linear layer's `weight` in its fastest form; None where the plain matrix is that.

        `int8` rounds the weights to 8 bits a channel, and each token's activations likewise when
        the layer is applied; `MissingDependencyError` where no kernel for that exists.
        """
        ...
