"""Static tensors of captured steps, by (slot, name): taken once at their largest and never moved.

A step writes all of its bucket's part: its own values in front, and padding behind them.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phalanx.device.base import DeviceBackend
from phalanx.errors import ConfigurationError
from phalanx.step.lease import BufferClaim, SlotLease


class SlotBuffers:
    """See the module."""

    def __init__(self, backend: DeviceBackend) -> None:
        self._backend = backend
        self._max_rows = 0
        self._max_tokens = 0
        self._buffers: dict[tuple[int, str], Tensor] = {}

    def claim(self, claim: BufferClaim) -> None:
        """Have room for a node's buckets; before anything is captured."""
        self._max_rows = max(self._max_rows, claim.max_rows)
        self._max_tokens = max(self._max_tokens, claim.max_tokens)

    def rows(
        self, lease: SlotLease, name: str, values: NDArray[np.generic], fill: int, times: int = 1
    ) -> Tensor:
        """`values` [rows, ...] padded with `fill` to the bucket's rows, `times` over."""
        sizes = times * lease.bucket.rows, times * self._max_rows
        return self._written(lease, _named(name, times), values, fill, sizes)

    def tokens(
        self, lease: SlotLease, name: str, values: NDArray[np.generic], fill: int, times: int = 1
    ) -> Tensor:
        """`values` [tokens, ...] padded with `fill` to the bucket's tokens, `times` over."""
        sizes = times * lease.bucket.tokens, times * self._max_tokens
        return self._written(lease, _named(name, times), values, fill, sizes)

    def starts(
        self, lease: SlotLease, name: str, values: NDArray[np.generic], times: int = 1
    ) -> Tensor:
        """Where each row begins, and the end [rows + 1]; rows behind the last one are empty."""
        sizes = times * lease.bucket.rows + 1, times * self._max_rows + 1
        return self._written(lease, _named(name, times), values, int(values[-1]), sizes)

    def tensor(
        self, lease: SlotLease, name: str, shape: tuple[int, ...], like: torch.dtype
    ) -> Tensor:
        """A row buffer that only the device writes, `[bucket's rows, *shape]`."""
        whole = self._buffer(lease.slot, name, (self._max_rows, *shape), like)
        return whole[: lease.bucket.rows]

    def _written(
        self,
        lease: SlotLease,
        name: str,
        values: NDArray[np.generic],
        fill: int,
        sizes: tuple[int, int],
    ) -> Tensor:
        size, most = sizes
        if len(values) > size or size > most:
            raise ConfigurationError(
                f"{name!r} of a captured step has {len(values)} entries, its bucket {lease.bucket} "
                f"{size}, and buffers were claimed for {most}"
            )
        padded = np.full((size, *values.shape[1:]), fill, dtype=values.dtype)
        padded[: len(values)] = values
        uploaded = self._backend.upload(padded)
        whole = self._buffer(lease.slot, name, (most, *values.shape[1:]), uploaded.dtype)
        return whole[:size].copy_(uploaded)

    def _buffer(self, slot: int, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        found = self._buffers.get((slot, name))
        if found is None:
            # An ordinary tensor, which may be written outside of inference too.
            with torch.inference_mode(False):
                found = self._backend.zeros(shape, dtype)
            self._buffers[slot, name] = found
        if found.shape != shape or found.dtype != dtype:
            raise ConfigurationError(
                f"{name!r} of a captured step is {shape} of {dtype} and was {tuple(found.shape)} of "
                f"{found.dtype} when it was captured; static buffers never move"
            )
        return found


def _named(name: str, times: int) -> str:
    """Captures of one node may combine a label's sources in different numbers."""
    return name if times == 1 else f"{name} of {times}"
