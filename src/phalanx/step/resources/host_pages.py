"""Pages in host memory that take what a paged cache offloads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.device.base import DeviceBackend
from phalanx.step.resources.kv_step import KVConfig
from phalanx.step.resources.kv_storage import KVStorage


class HostPages:
    """`config.host_pages` pages with the geometry of the cache's own, and who copies to and fro.

    A copy has ended when its call returns. Taking pages and giving them back is under the cache's
    lock; copying is not.
    """

    def __init__(self, config: KVConfig, storage: KVStorage, backend: DeviceBackend) -> None:
        self._storage = storage
        self._backend = backend
        self._num_pages = config.host_pages
        self._free = list(range(config.host_pages - 1, -1, -1))
        self._config = config
        self._layers = self._allocated()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> tuple[int, ...]:
        """`count` pages; the caller has checked that so many are free."""
        assert count <= len(self._free), f"{count} host pages wanted, {len(self._free)} free"
        return tuple([self._free.pop() for _ in range(count)])

    def give_back(self, pages: Sequence[int]) -> None:
        self._free.extend(reversed(pages))

    def at_rest(self) -> bool:
        return len(self._free) == self._num_pages

    def release(self) -> None:
        """Give the memory back; no page may be taken."""
        self._layers = ()

    def restore(self) -> None:
        """Take the memory again, empty."""
        self._layers = self._allocated()

    def store(self, device_pages: Sequence[int], host_pages: Sequence[int]) -> None:
        """Copy whole pages of every layer from the device, one to one."""
        if not device_pages:
            return
        origin = torch.tensor(device_pages, device=self._backend.device)
        target = torch.tensor(host_pages)
        for index, pair in enumerate(self._layers):
            for kept, tensor in zip(pair, self._storage.layer(index), strict=True):
                kept[target] = tensor[origin].cpu()

    def load(self, host_pages: Sequence[int], device_pages: Sequence[int]) -> None:
        """Copy whole pages of every layer to the device, one to one."""
        if not host_pages:
            return
        origin = torch.tensor(host_pages)
        target = torch.tensor(device_pages, device=self._backend.device)
        for index, pair in enumerate(self._layers):
            for kept, tensor in zip(pair, self._storage.layer(index), strict=True):
                tensor[target] = kept[origin].to(tensor.device)
        # The next step may run on another stream.
        self._backend.record_event().synchronize()

    def _allocated(self) -> tuple[tuple[Tensor, Tensor], ...]:
        config, alloc = self._config, self._backend.alloc_host
        shape = (config.host_pages, config.page_size, config.num_kv_heads, config.head_dim)
        return tuple(
            (alloc(shape, config.dtype), alloc(shape, config.dtype))
            for _ in range(config.num_layers if config.host_pages else 0)
        )
