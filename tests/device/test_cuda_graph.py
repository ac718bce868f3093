"""What is left of a device when a CUDA graph was captured, or could not be; without a device."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from phalanx.device.cuda_graph import CudaGraph, GraphMemory
from phalanx.device.graph import CaptureScope
from phalanx.errors import ConfigurationError

INVALID = "operation failed due to a previous error during capture"


class Graph:
    """As torch's: once its capture is broken, ending it raises."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def capture_begin(self, pool, capture_error_mode):
        assert self._device.stream == "capture"
        self._device.log.append(f"begin in {pool}")
        self._device.allocating.append(pool)

    def capture_end(self):
        if self._device.broken:
            self._device.broken = False
            raise RuntimeError(INVALID)
        self._device.log.append("end")
        self._device.allocating.pop()

    def replay(self):
        self._device.log.append("replay")


class Device:
    """One stream is current, and the pools that memory is taken from are a stack."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.allocating: list[int] = []
        self.stream = "default"
        self.broken = False
        self.may_wait = True
        self._num_pools = 0

    def settle(self):
        self.log.append("settle")

    @contextmanager
    def refusing_waits(self):
        self.may_wait = False
        try:
            yield
        finally:
            self.may_wait = True

    @contextmanager
    def on_capture_stream(self):
        self.stream = "capture"
        try:
            yield
        finally:
            self.stream = "default"

    def new_graph(self):
        return Graph(self)

    def new_pool(self):
        self._num_pools += 1
        return self._num_pools

    def end_allocation(self, pool):
        if pool not in self.allocating:
            raise RuntimeError("not recording to this pool")
        self.allocating.remove(pool)

    def wait(self):
        if not self.may_wait:
            raise RuntimeError("called a synchronizing CUDA operation")
        if self.stream == "capture":
            self.broken = True
            raise RuntimeError("operation not permitted when stream is capturing")


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def memory(device) -> GraphMemory:
    return GraphMemory(device)


def ones():
    return {"y": torch.ones(1)}


def captured(memory, compute=ones) -> CudaGraph:
    graph = CudaGraph(CaptureScope(), memory)
    graph.capture(compute)
    return graph


def at_rest(device: Device) -> bool:
    return device.stream == "default" and not device.allocating and device.may_wait


def test_a_wait_is_refused_before_the_capture_begins(device, memory):
    def waits():
        device.wait()
        return ones()

    with pytest.raises(ConfigurationError, match="synchronizing"):
        captured(memory, waits)
    assert device.log == []
    assert at_rest(device)


def test_a_capture_that_breaks_leaves_the_stream_and_the_allocator(device, memory):
    def breaks():
        if device.stream == "capture":
            device.wait()
        return ones()

    kept = captured(memory)
    with pytest.raises(ConfigurationError, match="not permitted when stream is capturing"):
        captured(memory, breaks)
    assert at_rest(device)
    device.log.clear()
    again = captured(memory)
    assert device.log == ["settle", "begin in 2", "end"], "another pool after a failure"
    kept.replay()
    again.replay()


def test_an_error_of_the_computation_ends_the_capture(device, memory):
    def fails():
        if device.stream == "capture":
            raise KeyError("broken")
        return ones()

    with pytest.raises(KeyError, match="broken"):
        captured(memory, fails)
    assert device.log == ["settle", "begin in 1", "end"]
    assert at_rest(device)


def test_a_capture_that_cannot_be_ended(device, memory):
    def breaks_silently():
        device.broken = device.stream == "capture"
        return ones()

    with pytest.raises(ConfigurationError, match=INVALID):
        captured(memory, breaks_silently)
    assert at_rest(device)


def test_graphs_share_a_pool_that_ends_with_the_last_of_them(device, memory):
    graphs = [captured(memory), captured(memory)]
    assert [line for line in device.log if "begin" in line] == ["begin in 1"] * 2
    graphs.clear()
    device.log.clear()
    graphs.append(captured(memory))
    assert "begin in 2" in device.log
