"""The memory behind a paged cache: one pair of tensors a layer, addressed by page."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.device.base import DeviceBackend
from phalanx.step.resources.kv_step import KVConfig


class KVStorage:
    """Keys and values, `[num_pages + 1, page_size, kv_heads, head_dim]` each; page 0 is the sink."""

    def __init__(self, config: KVConfig, backend: DeviceBackend) -> None:
        self._config = config
        self._backend = backend
        self._layers = self._allocated()

    @property
    def released(self) -> bool:
        return not self._layers

    @property
    def num_bytes(self) -> int:
        """What it holds of the device."""
        return sum(tensor.nbytes for pair in self._layers for tensor in pair)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer."""
        return self._layers[index]

    def copy_pages(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy whole pages of every layer, one to one."""
        if not source:
            return
        device = self._backend.device
        origin, to = torch.tensor(source, device=device), torch.tensor(target, device=device)
        for pair in self._layers:
            for tensor in pair:
                tensor[to] = tensor[origin]

    def release(self) -> None:
        """Let go of the memory."""
        self._layers = ()

    def restore(self) -> None:
        """Take the memory again, empty."""
        self._layers = self._allocated()

    def _allocated(self) -> tuple[tuple[Tensor, Tensor], ...]:
        config, zeros = self._config, self._backend.zeros
        shape = (config.num_pages + 1, config.page_size, config.num_kv_heads, config.head_dim)
        return tuple(
            (zeros(shape, config.dtype), zeros(shape, config.dtype))
            for _ in range(config.num_layers)
        )
