"""The fused operators of a step: the interface, its implementations, and the one factory."""

from __future__ import annotations

import logging

import torch

from phalanx.device.operators.base import Operators
from phalanx.device.operators.native import DTYPES, NativeOperators
from phalanx.device.operators.torch_operators import TorchOperators
from phalanx.errors import ConfigurationError, MissingDependencyError

logger = logging.getLogger(__name__)

CHOICES = ("auto", "off", "required")


def create_operators(choice: str, device_type: str, dtype: torch.dtype) -> Operators:
    """The operators for parameters of `dtype` on `device_type`.

    `off` is plain torch. `auto` is the native operators where they exist for this device and
    dtype and can be built, else plain torch; `required` raises where they cannot be had.
    """
    if choice not in CHOICES:
        raise ConfigurationError(f"native_operators={choice!r}; allowed: {', '.join(CHOICES)}")
    if choice == "off":
        return TorchOperators()
    if device_type != "cpu" or dtype not in DTYPES:
        if choice == "auto":
            return TorchOperators()
        raise ConfigurationError(
            f"native_operators='required' has no operators for device {device_type!r} and {dtype}; "
            f"they exist for cpu with {', '.join(map(str, DTYPES))}; use 'auto' or 'off'"
        )
    try:
        return NativeOperators()
    except (MissingDependencyError, OSError) as error:
        if choice == "required":
            raise
        reason = str(error).splitlines()[0]
        logger.info("native operators are not available, plain torch serves instead: %s", reason)
        return TorchOperators()
