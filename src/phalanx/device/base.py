"""What the step engine asks of a device; resources and models see devices only through this."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class DeviceEvent(Protocol):
    """A point in a device's work."""

    def synchronize(self) -> None:
        """Return when everything submitted before the event has finished."""
        ...


class DeviceBackend(Protocol):
    """One device of one rank."""

    @property
    def device(self) -> torch.device: ...

    def upload(self, values: NDArray[np.generic]) -> Tensor:
        """A device tensor with these values; the array must not be changed afterwards."""
        ...

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor of zeros that takes memory, as far as the device can, only where it is used."""
        ...

    def record_event(self) -> DeviceEvent:
        """An event behind everything submitted so far on the current stream."""
        ...

    def range(self, name: str) -> AbstractContextManager[None]:
        """A named profiling range."""
        ...

    def stage_s(self) -> dict[str, float]:
        """Host seconds of each range so far; empty where nobody asked for them."""
        ...

    def release_cached_memory(self) -> None:
        """Give memory that the allocator keeps for reuse back to the device."""
        ...
