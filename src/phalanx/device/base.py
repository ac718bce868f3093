"""What the step engine asks of a device; resources and models see devices only through this."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phalanx.device.graph import DeviceGraph


class DeviceEvent(Protocol):
    """A point in a device's work."""

    def synchronize(self) -> None:
        """Return when everything submitted before the event has finished."""
        ...


class DeviceStream(Protocol):
    """A queue of a device's work: in order within itself, unordered against others."""

    def synchronize(self) -> None:
        """Return when everything submitted to the stream has finished."""
        ...


class DeviceMemory(Protocol):
    """The device's memory, and the host's for copies to and from it."""

    @property
    def device(self) -> torch.device: ...

    def upload(self, values: NDArray[np.generic]) -> Tensor:
        """A device tensor with these values; the array must not be changed afterwards."""
        ...

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor of zeros that takes memory, as far as the device can, only where it is used."""
        ...

    def alloc_host(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialized host memory, pinned where that makes copies asynchronous."""
        ...

    def release_cached_memory(self) -> None:
        """Give memory that the allocator keeps for reuse back to the device."""
        ...


class DeviceStreams(Protocol):
    """The order of the device's work."""

    @property
    def asynchronous(self) -> bool:
        """Whether the device computes while the host goes on."""
        ...

    def stream(self) -> DeviceStream:
        """A new stream beside the default one."""
        ...

    def on_stream(self, stream: DeviceStream) -> AbstractContextManager[None]:
        """Submit to `stream` what this thread submits inside."""
        ...

    def record_event(self) -> DeviceEvent:
        """An event behind everything submitted so far on the current stream."""
        ...

    def wait_event(self, event: DeviceEvent) -> None:
        """Let what is submitted next to the current stream wait for `event`; the host does not."""
        ...


class DeviceGraphs(Protocol):
    """Captured computations."""

    @property
    def captures(self) -> bool:
        """Whether steps are to be captured on this device."""
        ...

    @property
    def capturing(self) -> bool:
        """Whether a capture is running now."""
        ...

    def create_graph(self) -> DeviceGraph:
        """An empty graph; the backend must be one that captures."""
        ...


class DeviceProfiling(Protocol):
    """Where the host's time goes."""

    def range(self, name: str) -> AbstractContextManager[None]:
        """A named profiling range."""
        ...

    def stage_s(self) -> dict[str, float]:
        """Host seconds of each range so far; empty where nobody asked for them."""
        ...


class DeviceBackend(DeviceMemory, DeviceStreams, DeviceGraphs, DeviceProfiling, Protocol):
    """One device of one rank."""
