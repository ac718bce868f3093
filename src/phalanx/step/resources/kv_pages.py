"""Tokens of a paged cache as bytes: gathered for another engine, and stored as they come."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.device.base import DeviceBackend
from phalanx.step.resources.kv_step import KVConfig
from phalanx.step.resources.kv_storage import KVStorage


class TokenRange:
    """Tokens `start` to `stop` of a stream in `pages`: a chunk of keys and one of values a layer.

    Both what is sent and where it is stored.
    """

    def __init__(
        self,
        config: KVConfig,
        storage: KVStorage,
        pages: Sequence[int],
        start: int,
        stop: int,
        backend: DeviceBackend,
    ) -> None:
        self._storage = storage
        self._backend = backend
        self._dtype = config.dtype
        self._shape = (stop - start, config.num_kv_heads, config.head_dim)
        self._num_layers = config.num_layers
        tokens = torch.arange(start, stop)
        page_of = torch.tensor(pages, dtype=torch.int64)[tokens // config.page_size]
        slots = page_of * config.page_size + tokens % config.page_size
        self._slots = slots.to(backend.device)

    @property
    def num_chunks(self) -> int:
        return 2 * self._num_layers

    @property
    def chunk_bytes(self) -> int:
        return math.prod(self._shape) * self._dtype.itemsize

    def chunk(self, index: int) -> memoryview:
        """The bytes of one chunk, copied."""
        values = self._tokens(index)[self._slots].contiguous().cpu()
        return values.reshape(-1).view(torch.uint8).numpy().data

    def write(self, index: int, chunk: memoryview) -> None:
        """Store one chunk."""
        values = torch.frombuffer(chunk, dtype=torch.uint8).view(self._dtype).view(self._shape)
        with torch.inference_mode():
            self._tokens(index)[self._slots] = values.to(self._backend.device)

    def finish(self) -> None:
        """Return when all that was stored is there."""
        self._backend.record_event().synchronize()

    def _tokens(self, index: int) -> Tensor:
        layer, part = divmod(index, 2)
        return self._storage.layer(layer)[part].flatten(0, 1)
