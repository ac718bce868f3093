"""What can be asked about devices without using one: no context is made on any."""

from __future__ import annotations

import torch


def visible_devices(target: str) -> int | None:
    """How many devices of the kind of `target` this process sees; None where ranks share the CPU."""
    return torch.cuda.device_count() if _on_cuda(target) else None


def utilization(target: str) -> float | None:
    """The part of the driver's last sample period in which `target`, `cuda:N`, computed: 0 to 1.

    None for a CPU, and where the driver cannot be asked (that takes the package nvidia-ml-py).
    """
    if not _on_cuda(target):
        return None
    try:
        import pynvml
    except ImportError:
        return None
    try:
        return torch.cuda.utilization(torch.device(target)) / 100
    except (RuntimeError, pynvml.NVMLError):
        return None


def _on_cuda(target: str) -> bool:
    return torch.device(target).type == "cuda"
