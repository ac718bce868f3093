"""The CUDA backend: host values are staged in pinned memory and copied asynchronously."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phalanx.device.stage_times import StageTimes
from phalanx.errors import ConfigurationError


@contextmanager
def _nvtx_range(name: str, times: StageTimes | None) -> Iterator[None]:
    torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]
    try:
        with nullcontext() if times is None else times.range(name):
            yield
    finally:
        torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]


class CudaBackend:
    """One CUDA device, pinned for the calling thread."""

    def __init__(self, device: torch.device, times: StageTimes | None = None) -> None:
        if not torch.cuda.is_available():
            raise ConfigurationError(
                f"device target {str(device)!r} needs a CUDA device and none is available; "
                "use target cpu"
            )
        count = torch.cuda.device_count()
        index = torch.cuda.current_device() if device.index is None else device.index
        if index >= count:
            raise ConfigurationError(
                f"device target {str(device)!r} does not exist; {count} CUDA devices are visible"
            )
        torch.cuda.set_device(index)
        self._device = torch.device("cuda", index)
        self._times = times

    @property
    def device(self) -> torch.device:
        return self._device

    def upload(self, values: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(values).pin_memory().to(self._device, non_blocking=True)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self._device)

    def record_event(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def range(self, name: str) -> AbstractContextManager[None]:
        return _nvtx_range(name, self._times)

    def stage_s(self) -> dict[str, float]:
        return {} if self._times is None else self._times.seconds()

    def release_cached_memory(self) -> None:
        torch.cuda.empty_cache()


def device_count() -> int:
    """How many CUDA devices this process sees; makes no context on them."""
    return torch.cuda.device_count()
