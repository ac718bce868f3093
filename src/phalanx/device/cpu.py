"""The CPU backend: work is finished when a call returns, so its events are always complete."""

from __future__ import annotations

import gc
import math
import mmap
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phalanx.device.base import DeviceEvent, DeviceStream
from phalanx.device.dispatch_tape import DispatchTape
from phalanx.device.graph import CaptureScope, DeviceGraph, RerunGraph
from phalanx.device.stage_times import StageTimes
from phalanx.errors import ConfigurationError
from phalanx.heap import give_back_freed_memory

_CACHE_LINE = 64
"""Bytes; vector loads that cross a line are slower."""
_MAPPED_BYTES = 1 << 20
"""From here on a tensor has pages of its own."""
_NO_RANGE: AbstractContextManager[None] = nullcontext()


class CpuEvent:
    """An event, or a stream, on a device whose calls are synchronous."""

    def synchronize(self) -> None:
        return


CPU_CAPTURES = ("off", "tape", "rerun")


class CpuBackend:
    """The machine's processor.

    `capture` is how steps are captured: not at all, on a `tape` of what torch dispatched, or not
    recorded but computed again (`rerun`), which tells what a tape baked in. None is faster.
    """

    def __init__(self, times: StageTimes | None = None, capture: str = "off") -> None:
        if capture not in CPU_CAPTURES:
            raise ConfigurationError(
                f"capture={capture!r} on a CPU; allowed: {', '.join(CPU_CAPTURES)}"
            )
        self._times = times
        self._capture = capture
        self._scope = CaptureScope()
        self._device = torch.device("cpu")
        self._event = CpuEvent()

    @property
    def device(self) -> torch.device:
        return self._device

    def upload(self, values: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(values)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        # Pages that the system zeroes on first touch; torch would write them all now.
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes >= _MAPPED_BYTES:
            # The heap would zero what was used before, and might keep what is freed.
            return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=dtype).view(shape)
        block = np.zeros(num_bytes + _CACHE_LINE, dtype=np.uint8)
        start = -block.ctypes.data % _CACHE_LINE
        return torch.from_numpy(block[start : start + num_bytes]).view(dtype).view(shape)

    def alloc_host(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    @property
    def asynchronous(self) -> bool:
        return False

    def stream(self) -> CpuEvent:
        return self._event

    def on_stream(self, stream: DeviceStream) -> AbstractContextManager[None]:
        return _NO_RANGE

    def record_event(self) -> CpuEvent:
        return self._event

    def wait_event(self, event: DeviceEvent) -> None:
        return

    @property
    def captures(self) -> bool:
        return self._capture != "off"

    @property
    def capturing(self) -> bool:
        return self._scope.active

    def create_graph(self) -> DeviceGraph:
        if self._capture == "off":
            raise ConfigurationError(
                "this backend does not capture; create it with capture='tape' or 'rerun'"
            )
        return DispatchTape(self._scope) if self._capture == "tape" else RerunGraph(self._scope)

    def range(self, name: str) -> AbstractContextManager[None]:
        return _NO_RANGE if self._times is None else self._times.range(name)

    def stage_s(self) -> dict[str, float]:
        return {} if self._times is None else self._times.seconds()

    def release_cached_memory(self) -> None:
        gc.collect()
        give_back_freed_memory()
