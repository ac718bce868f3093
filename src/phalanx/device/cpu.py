"""The CPU backend: work is finished when a call returns, so its events are always complete."""

from __future__ import annotations

import gc
import math
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phalanx.device.stage_times import StageTimes

_CACHE_LINE = 64
"""Bytes; vector loads that cross a line are slower."""
_NO_RANGE: AbstractContextManager[None] = nullcontext()


class CpuEvent:
    """An event on a device whose calls are synchronous."""

    def synchronize(self) -> None:
        return


class CpuBackend:
    """The machine's processor."""

    def __init__(self, times: StageTimes | None = None) -> None:
        self._times = times
        self._device = torch.device("cpu")
        self._event = CpuEvent()

    @property
    def device(self) -> torch.device:
        return self._device

    def upload(self, values: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(values)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        # numpy takes pages that the system zeroes on first touch; torch would write them all now.
        num_bytes = math.prod(shape) * dtype.itemsize
        block = np.zeros(num_bytes + _CACHE_LINE, dtype=np.uint8)
        start = -block.ctypes.data % _CACHE_LINE
        return torch.from_numpy(block[start : start + num_bytes]).view(dtype).view(shape)

    def record_event(self) -> CpuEvent:
        return self._event

    def range(self, name: str) -> AbstractContextManager[None]:
        return _NO_RANGE if self._times is None else self._times.range(name)

    def stage_s(self) -> dict[str, float]:
        return {} if self._times is None else self._times.seconds()

    def release_cached_memory(self) -> None:
        gc.collect()
