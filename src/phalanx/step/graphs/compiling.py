"""Compilation of forwards, where a device gains by it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from phalanx.device.base import DeviceBackend
from phalanx.step.attempt import attempt
from phalanx.step.outputs import NodeOutputs

logger = logging.getLogger(__name__)

Forward = Callable[[Any], NodeOutputs]


def compiled(call: Forward, backend: DeviceBackend, *, captured: bool) -> Forward:
    """`call` compiled, or itself on a CPU or where compiling fails.

    For one that is `captured` shapes are fixed and tuned, and the graph is left to us.
    """
    if backend.device.type == "cpu":
        return call
    if captured:
        make = partial(torch.compile, call, mode="max-autotune-no-cudagraphs", dynamic=False)
    else:
        make = partial(torch.compile, call, fullgraph=False)
    made = attempt(make)
    if made.value is None:
        logger.warning("a forward is not compiled: %s", made.error)
        return call
    return made.value
