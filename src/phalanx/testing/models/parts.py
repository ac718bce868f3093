"""What the small models have in common: layers, weights, and how their requests begin."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.device.operators.base import HeadLayout, Operators
from phalanx.loop.request import Work
from phalanx.step.outputs import Column, NodeOutputs
from phalanx.step.resources.attention import PagedAttention
from phalanx.step.resources.base import ResourceConfig
from phalanx.step.resources.kv_step import KVConfig

HEADS = HeadLayout(num_heads=4, num_kv_heads=2, head_dim=8)
WIDTH = HEADS.num_heads * HEADS.head_dim
VOCAB_SIZE = 61
EPS = 1e-6


class RandomWeights:
    """Fixed random float32 weights; the same seed gives the same, in the order of the calls."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def take(self, *shape: int) -> Tensor:
        """A weight whose product with a unit vector is about as long."""
        return torch.randn(shape, generator=self._generator).div_(math.sqrt(shape[-1]))

    def embedding(self, rows: int, width: int) -> Tensor:
        return torch.randn((rows, width), generator=self._generator)


class Block:
    """A layer of self-attention and a small MLP, over a paged cache."""

    def __init__(self, weights: RandomWeights, operators: Operators) -> None:
        self._operators = operators
        self._norm = torch.ones(WIDTH)
        self._qkv = weights.take((HEADS.num_heads + 2 * HEADS.num_kv_heads) * HEADS.head_dim, WIDTH)
        self._out = weights.take(WIDTH, WIDTH)
        self._up = weights.take(2 * WIDTH, WIDTH)
        self._down = weights.take(WIDTH, WIDTH)

    def attend(self, x: Tensor, attention: PagedAttention, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """`x` [T, WIDTH] and what its tokens say to each other."""
        return x + attention.attend(self.norm(x) @ self._qkv.T, HEADS, rotary) @ self._out.T

    def think(self, x: Tensor) -> Tensor:
        """`x` and what each token makes of itself."""
        return x + self._operators.silu_mul(self.norm(x) @ self._up.T) @ self._down.T

    def norm(self, x: Tensor) -> Tensor:
        return self._operators.rms_norm(x, self._norm, EPS)


def rotary_tables(positions: Tensor) -> tuple[Tensor, Tensor]:
    """(cos, sin) of int64 positions [T], each float32 [T, head_dim / 2]."""
    half = HEADS.head_dim // 2
    frequencies = 100.0 ** (-torch.arange(half, dtype=torch.float32) / half)
    angles = positions.float()[:, None] * frequencies
    return angles.cos(), angles.sin()


def kv_config(num_layers: int, num_pages: int, host_pages: int = 0) -> KVConfig:
    """A cache of these layers, with pages of four tokens."""
    return KVConfig(
        num_layers=num_layers,
        num_kv_heads=HEADS.num_kv_heads,
        head_dim=HEADS.head_dim,
        num_pages=num_pages,
        page_size=4,
        max_seq_len=64,
        dtype=torch.float32,
        host_pages=host_pages,
    )


@dataclass(frozen=True)
class Prepared:
    """The argument of an eager forward. A captured one gets the tensors alone."""

    tensors: Mapping[str, Tensor]
    request_ids: tuple[str, ...]
    giving: Mapping[str, tuple[str, ...]]
    """The requests that have a row in an output, by its name; all of them in those left out."""


def tensors_of(prepared: Prepared | Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return prepared.tensors if isinstance(prepared, Prepared) else prepared


def answer(prepared: Prepared | Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> NodeOutputs:
    """Outputs with one row a request, or, captured, one a row of the bucket."""
    if not isinstance(prepared, Prepared):
        return NodeOutputs({name: Column.by_row(values) for name, values in outputs.items()})
    rids = prepared.request_ids
    return NodeOutputs(
        {
            name: Column(prepared.giving.get(name, rids), values)
            for name, values in outputs.items()
            if prepared.giving.get(name, rids)
        }
    )


class SmallRequest(ABC):
    """What most requests of the small models answer alike: no settings, and nothing before the end."""

    @abstractmethod
    def next_work(self) -> Work | None:
        """What to compute next; None at the end."""

    def resource_configs(self) -> Mapping[str, ResourceConfig]:
        return {}

    def adopt(self, num_tokens: int) -> None:
        raise AssertionError("this model leaves nothing in a cache that others could take over")

    def take_delta(self) -> object | None:
        return None
