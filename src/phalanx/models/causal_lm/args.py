"""Arguments of the `causal_lm` plugin; importable without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from phalanx.engine_config import EntryArgs
from phalanx.errors import ConfigurationError

QUANTIZATIONS = (None, "int8")
NATIVE_OPERATORS = ("auto", "off", "required")
EVICTIONS = ("lru", "priority")
TRANSFERS = ("shm", "tcp")


@dataclass(frozen=True)
class CausalLMArgs(EntryArgs):
    """What to load and how much to keep in memory.

    `checkpoint_dir`: a Hugging Face directory (config.json, safetensors, tokenizer).
    `context_length`: tokens of prompt and output of one request (None: the checkpoint's own).
    `pool_tokens`: tokens that the KV cache holds over all requests. `page_size`: tokens a page.
    `max_batch_size`: requests in one step. `max_step_tokens`: tokens in one step; longer prompts
    are computed in chunks. `native_operators`: `auto` builds and uses the C++ operators where a
    compiler is found, `off` never does, `required` fails without them. `quantization`: None, or
    `int8` for weights of 8 bits with activations quantized per token. `prefix_cache` keeps what
    was computed while there is room, and computes of a prompt only what no earlier one began with.

    `host_pool_tokens` tokens of host memory take the state of requests that were moved out of the
    cache for want of room; what does not fit there is computed again. `eviction`: who is moved
    first, `lru` for those computed longest ago, `priority` for those that hold most of the cache.

    With `speculate` the next step is prepared, and planned, while one is computed, and what a step
    gives is looked at while the next one runs; on one rank only.

    `transfer`: how another engine reads what this one hands over: `shm` on the same machine, `tcp`
    at `transfer_host`, an address of this machine. It is kept for at most `transfer_ttl_s`.
    """

    checkpoint_dir: str | Path
    context_length: int | None = None
    pool_tokens: int = 32768
    page_size: int = 16
    max_batch_size: int = 64
    max_step_tokens: int = 512
    native_operators: str = "auto"
    quantization: str | None = None
    prefix_cache: bool = True
    host_pool_tokens: int = 0
    eviction: str = "lru"
    speculate: bool = False
    transfer: str = "shm"
    transfer_host: str = "127.0.0.1"
    transfer_ttl_s: float = 120.0

    def __post_init__(self) -> None:
        for name in ("pool_tokens", "page_size", "max_batch_size", "max_step_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigurationError(f"{name}={value!r} must be a positive integer")
        if self.context_length is not None and self.context_length < 1:
            raise ConfigurationError(f"context_length={self.context_length!r} must be positive")
        if not isinstance(self.prefix_cache, bool):
            raise ConfigurationError(f"prefix_cache={self.prefix_cache!r} must be true or false")
        if not isinstance(self.speculate, bool):
            raise ConfigurationError(f"speculate={self.speculate!r} must be true or false")
        host = self.host_pool_tokens
        if isinstance(host, bool) or not isinstance(host, int) or host < 0:
            raise ConfigurationError(
                f"host_pool_tokens={host!r} must be a number of tokens, or 0 for none"
            )
        if self.eviction not in EVICTIONS:
            raise ConfigurationError(f"eviction={self.eviction!r}; allowed: {EVICTIONS}")
        self._check_transfer()
        if self.native_operators not in NATIVE_OPERATORS:
            raise ConfigurationError(
                f"native_operators={self.native_operators!r}; allowed: {NATIVE_OPERATORS}"
            )
        if self.quantization not in QUANTIZATIONS:
            raise ConfigurationError(
                f"quantization={self.quantization!r}; allowed: {QUANTIZATIONS}"
            )

    def _check_transfer(self) -> None:
        if self.transfer not in TRANSFERS:
            raise ConfigurationError(f"transfer={self.transfer!r}; allowed: {TRANSFERS}")
        if not self.transfer_host:
            raise ConfigurationError("transfer_host is empty; give an address of this machine")
        if not (math.isfinite(self.transfer_ttl_s) and self.transfer_ttl_s > 0):
            raise ConfigurationError(
                f"transfer_ttl_s={self.transfer_ttl_s!r} must be a finite number above 0"
            )
