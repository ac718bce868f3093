"""Compilation of forwards, where a device gains by it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from phalanx.device.base import DeviceBackend
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
        made = torch.compile(call, mode="max-autotune-no-cudagraphs", dynamic=False)
    else:
        made = torch.compile(call, fullgraph=False)
    return CompiledForward(call, made, torch._dynamo.exc.TorchDynamoException)


class CompiledForward:
    """`made`, until it cannot be compiled; then and from then on `call` itself.

    Compiling happens in calls, the first one and those of other shapes, and so do its errors. Errors
    of the forward pass through.
    """

    def __init__(self, call: Forward, made: Forward, compile_error: type[Exception]) -> None:
        self._call = call
        self._made = made
        self._compile_error = compile_error

    def __call__(self, prepared: Any) -> NodeOutputs:  # noqa: ANN401
        try:
            return self._made(prepared)
        except self._compile_error as error:
            if self._made is self._call:
                raise
            logger.warning("a forward is not compiled: %s", error)
            self._made = self._call
            return self._call(prepared)
