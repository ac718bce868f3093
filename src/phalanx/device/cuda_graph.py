"""A CUDA graph behind the interface of `DeviceGraph`, and the memory that a device's graphs share."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor

from phalanx.device.graph import CaptureScope, Computation
from phalanx.errors import ConfigurationError, PhalanxError

Pool = Any
"""What torch calls a pool of memory by."""


class RecordedGraph(Protocol):
    """What is used of `torch.cuda.CUDAGraph`."""

    def capture_begin(self, pool: Pool, capture_error_mode: str) -> None: ...

    def capture_end(self) -> None: ...

    def replay(self) -> None: ...


class Recorder(Protocol):
    """What captures need of a device."""

    def settle(self) -> None:
        """Wait for the device, and give back what the allocator keeps."""
        ...

    def refusing_waits(self) -> AbstractContextManager[None]:
        """Inside, operations that wait for the device raise."""
        ...

    def on_capture_stream(self) -> AbstractContextManager[object]:
        """Submit to the stream of all captures; after it to what was current, whatever happened."""
        ...

    def new_graph(self) -> RecordedGraph: ...

    def new_pool(self) -> Pool: ...

    def end_allocation(self, pool: Pool) -> None:
        """Take memory from the pool no more; raises `RuntimeError` where nothing does."""
        ...


class CudaRecorder:
    """See `Recorder`. Graphs that share memory are captured on one stream, of this device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()

    @contextmanager
    def refusing_waits(self) -> Iterator[None]:
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            # It finds not all waits, as it says; a capture refuses the others itself.
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)

    def on_capture_stream(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def new_graph(self) -> RecordedGraph:
        return torch.cuda.CUDAGraph()

    def new_pool(self) -> Pool:
        return torch.cuda.graph_pool_handle()

    def end_allocation(self, pool: Pool) -> None:
        torch._C._cuda_endAllocateToPool(self._device.index, pool)


class GraphMemory:
    """The pool of a device's graphs. It ends with its last graph, and with a capture that fails;
    then there is another.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._pool: Pool = None
        self._graphs: WeakSet[RecordedGraph] = WeakSet()

    @contextmanager
    def recording(self, graph: RecordedGraph) -> Iterator[None]:
        """Record into `graph` what is submitted inside."""
        if not self._graphs:
            self._pool = self.recorder.new_pool()
        try:
            with self.recorder.on_capture_stream():
                # Other threads (transfers, uploads) may go on with what a capture must not do.
                graph.capture_begin(self._pool, capture_error_mode="thread_local")
                try:
                    yield
                except BaseException:
                    # What has broken a capture says more than that it cannot be ended.
                    with suppress(RuntimeError):
                        graph.capture_end()
                    raise
                graph.capture_end()
        except BaseException:
            # Where a capture could not be ended the allocator still gives it memory.
            with suppress(RuntimeError):
                self.recorder.end_allocation(self._pool)
            self._graphs = WeakSet()
            raise
        self._graphs.add(graph)


class CudaGraph:
    """See the module. Computed once before it is captured: a wait that is met inside of a capture
    leaves more behind than an error.
    """

    def __init__(self, scope: CaptureScope, memory: GraphMemory) -> None:
        self._scope = scope
        self._memory = memory
        self._graph: RecordedGraph | None = None
        self._outputs: dict[str, Tensor] = {}

    def capture(self, compute: Computation) -> Mapping[str, Tensor]:
        self._scope.enter()
        recorder = self._memory.recorder
        graph = recorder.new_graph()
        try:
            with recorder.refusing_waits():
                compute()
            recorder.settle()
            with self._memory.recording(graph):
                self._outputs = dict(compute())
        except RuntimeError as error:
            if "captur" not in str(error) and "synchronizing" not in str(error):
                raise
            raise ConfigurationError(
                f"a step cannot be captured on this device: {error}; compute on the device only, "
                "without waiting for its values"
            ) from error
        finally:
            self._scope.leave()
        self._graph = graph
        return self._outputs

    def replay(self) -> None:
        if self._graph is None:
            raise PhalanxError("a graph was replayed before it was captured")
        self._graph.replay()
