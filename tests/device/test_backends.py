"""Backends: what the step engine asks of a device, on the processor and, where there is one, on CUDA."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from phalanx.device import create_backend
from phalanx.device.cpu import CpuBackend
from phalanx.device.cuda import CudaBackend
from phalanx.errors import ConfigurationError

needs_cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device; none is visible to torch"
)


def test_a_target_names_its_backend():
    backend = create_backend("cpu")
    assert isinstance(backend, CpuBackend)
    assert backend.device == torch.device("cpu")


@pytest.mark.parametrize("target", ["mps", "xpu:0", "meta"])
def test_other_devices_are_refused_with_what_is_allowed(target):
    with pytest.raises(ConfigurationError, match=r"not supported; allowed: cpu, cuda\[:N\]"):
        create_backend(target)


@pytest.mark.parametrize("target", ["tpu", "", "cpu:x", "cuda:-1"])
def test_a_name_that_is_no_device_is_refused_too(target):
    with pytest.raises(ConfigurationError, match="allowed: cpu, cuda"):
        create_backend(target)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
def test_cuda_without_a_device_says_what_to_do():
    with pytest.raises(ConfigurationError, match="none is available; use target cpu"):
        create_backend("cuda")


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.float32])
def test_an_upload_keeps_values_shape_and_dtype(dtype):
    values = np.arange(6, dtype=dtype).reshape(2, 3)
    uploaded = create_backend("cpu").upload(values)
    assert uploaded.numpy().dtype == dtype
    assert np.array_equal(uploaded.numpy(), values)
    assert create_backend("cpu").upload(np.empty(0, dtype=dtype)).shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zeros_are_aligned_and_writable(dtype):
    zeros = create_backend("cpu").zeros((3, 5, 2), dtype)
    assert (zeros.shape, zeros.dtype) == ((3, 5, 2), dtype)
    assert not zeros.any()
    assert zeros.is_contiguous()
    assert zeros.data_ptr() % 64 == 0
    zeros.fill_(1.0)
    assert zeros.sum() == 30


def test_zeros_take_no_memory_before_they_are_used():
    before = resident_bytes()
    zeros = create_backend("cpu").zeros((1 << 26,), torch.float32)
    assert resident_bytes() - before < 64 << 20, "256 MiB are reserved, not taken"
    del zeros


def resident_bytes() -> int:
    """Memory of this process that is in use."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_work_on_the_processor_is_done_when_it_returns():
    backend = create_backend("cpu")
    backend.record_event().synchronize()
    with backend.range("outer"), backend.range("inner"):
        backend.release_cached_memory()


@needs_cuda
def test_cuda_uploads_and_events():
    backend = create_backend("cuda")
    assert isinstance(backend, CudaBackend)
    uploaded = backend.upload(np.arange(1000, dtype=np.int64))
    with backend.range("test"):
        doubled = uploaded * 2
    event = backend.record_event()
    event.synchronize()
    assert doubled.device == backend.device
    assert doubled.cpu().tolist() == list(range(0, 2000, 2))
    backend.release_cached_memory()


@needs_cuda
def test_a_cuda_device_that_is_not_there_is_refused():
    with pytest.raises(ConfigurationError, match="CUDA devices are visible"):
        create_backend(f"cuda:{torch.cuda.device_count()}")
