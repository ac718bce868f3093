"""Device backends: the only place that names `torch.cuda`."""

from __future__ import annotations

import torch

from phalanx.device.base import DeviceBackend
from phalanx.device.stage_times import StageTimes
from phalanx.errors import ConfigurationError

__all__ = ["DeviceBackend", "create_backend", "device_names", "num_devices"]


def create_backend(
    target: str, times: StageTimes | None = None, *, capture: str | None = None
) -> DeviceBackend:
    """The backend of a device target (`cpu`, `cuda` or `cuda:N`); its ranges count in `times`.

    `capture` is how it captures steps; by default a CPU does not, and CUDA does.
    """
    refusal = f"device target {target!r} is not supported; allowed: cpu, cuda[:N]"
    try:
        device = torch.device(target)
    except RuntimeError as error:
        raise ConfigurationError(refusal) from error
    if device.type == "cpu":
        from phalanx.device.cpu import CpuBackend

        return CpuBackend(times, "off" if capture is None else capture)
    if device.type == "cuda":
        from phalanx.device.cuda import CudaBackend

        return CudaBackend(device, times, "graph" if capture is None else capture)
    raise ConfigurationError(refusal)


def num_devices(target: str) -> int | None:
    """How many devices of the target's kind this process sees; None where ranks share the CPU."""
    if torch.device(target).type == "cpu":
        return None
    from phalanx.device.cuda import device_count

    return device_count()


def device_names() -> tuple[str, ...]:
    """The CUDA devices that this process sees, for people; empty where there are none."""
    from phalanx.device import cuda

    return cuda.device_names()
