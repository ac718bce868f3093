"""The CUDA backend: host values are staged in pinned memory and copied asynchronously."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phalanx.device.base import DeviceEvent, DeviceStream
from phalanx.device.cuda_graph import CudaGraph, CudaRecorder, GraphMemory
from phalanx.device.graph import CaptureScope, DeviceGraph, RerunGraph
from phalanx.device.stage_times import StageTimes
from phalanx.errors import ConfigurationError
from phalanx.heap import give_back_freed_memory


@contextmanager
def _nvtx_range(name: str, times: StageTimes | None) -> Iterator[None]:
    torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]
    try:
        with nullcontext() if times is None else times.range(name):
            yield
    finally:
        torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]


CUDA_CAPTURES = ("off", "graph", "rerun")


class CudaBackend:
    """One CUDA device, pinned for the calling thread.

    `capture` is how steps are captured: not at all, as a CUDA `graph`, or not recorded but computed
    again (`rerun`), which tells what a graph baked in.
    """

    def __init__(
        self, device: torch.device, times: StageTimes | None = None, capture: str = "graph"
    ) -> None:
        if capture not in CUDA_CAPTURES:
            raise ConfigurationError(
                f"capture={capture!r} on CUDA; allowed: {', '.join(CUDA_CAPTURES)}"
            )
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
        self._capture = capture
        self._scope = CaptureScope()
        self._graphs = GraphMemory(CudaRecorder(self._device))

    @property
    def device(self) -> torch.device:
        return self._device

    def upload(self, values: NDArray[np.generic]) -> Tensor:
        uploaded = torch.from_numpy(values).pin_memory().to(self._device, non_blocking=True)
        computing = torch.cuda.default_stream(self._device)
        if torch.cuda.current_stream(self._device) != computing:
            # A plan made on its own stream is read on the default one: its memory is not to be
            # reused before that is done.
            uploaded.record_stream(computing)
        return uploaded

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self._device)

    def alloc_host(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    @property
    def asynchronous(self) -> bool:
        return True

    def stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    @contextmanager
    def on_stream(self, stream: DeviceStream) -> Iterator[None]:
        assert isinstance(stream, torch.cuda.Stream)
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            yield

    def record_event(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait_event(self, event: DeviceEvent) -> None:
        assert isinstance(event, torch.cuda.Event)
        torch.cuda.current_stream(self._device).wait_event(event)

    @property
    def captures(self) -> bool:
        return self._capture != "off"

    @property
    def capturing(self) -> bool:
        return self._scope.active

    def create_graph(self) -> DeviceGraph:
        if self._capture == "off":
            raise ConfigurationError(
                "this backend does not capture; create it with capture='graph' or 'rerun'"
            )
        if self._capture == "rerun":
            return RerunGraph(self._scope)
        return CudaGraph(self._scope, self._graphs)

    def range(self, name: str) -> AbstractContextManager[None]:
        return _nvtx_range(name, self._times)

    def stage_s(self) -> dict[str, float]:
        return {} if self._times is None else self._times.seconds()

    def release_cached_memory(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        give_back_freed_memory()


def device_names() -> tuple[str, ...]:
    """Name and memory of each CUDA device that this process sees."""
    return tuple(
        f"cuda:{index} {found.name}, {found.total_memory / 1e9:.0f} GB"
        for index in range(device_count())
        for found in (torch.cuda.get_device_properties(index),)
    )


def device_count() -> int:
    """How many CUDA devices this process sees; makes no context on them."""
    return torch.cuda.device_count()
