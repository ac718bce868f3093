"""What a device's driver measures; asking makes no context on the device."""

from __future__ import annotations

import torch


def utilization(target: str) -> float | None:
    """The part of the driver's last sample period in which `target`, `cuda:N`, computed: 0 to 1.

    None for a CPU, and where the driver cannot be asked (that takes the package nvidia-ml-py).
    """
    if torch.device(target).type != "cuda":
        return None
    try:
        import pynvml
    except ImportError:
        return None
    try:
        return torch.cuda.utilization(torch.device(target)) / 100
    except (RuntimeError, pynvml.NVMLError):
        return None
