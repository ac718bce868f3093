"""A captured computation: recorded once, then replayed on the same memory without the code that
was captured. `DispatchTape` and `CudaGraph` record; `RerunGraph` only pretends to, for debugging.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from phalanx.errors import ConfigurationError, PhalanxError

Computation = Callable[[], Mapping[str, Tensor]]
"""What is captured: reads and writes tensors that outlive it, and returns its outputs by name."""


class DeviceGraph(Protocol):
    """One captured computation.

    What the computation read of the host while it was captured is baked in; its tensors keep their
    addresses; random operations draw again at each replay.
    """

    def capture(self, compute: Computation) -> Mapping[str, Tensor]:
        """Compute once, recording; the outputs, which every replay overwrites, and which the replay
        of another graph may: a device's graphs share memory.

        Raises `ConfigurationError` where the computation waits for a device value or is itself
        inside a capture.
        """
        ...

    def replay(self) -> None:
        """Compute again what was captured, into the same outputs."""
        ...


class CaptureScope:
    """Says whether a capture is running; a backend's graphs share one, since captures do not nest."""

    def __init__(self) -> None:
        self.active = False

    def enter(self) -> None:
        if self.active:
            raise ConfigurationError(
                "a capture was begun inside a capture; capture a part of a forward as a region, "
                "or the whole, not both"
            )
        self.active = True

    def leave(self) -> None:
        self.active = False


class RerunGraph:
    """Replays by calling the computation again and copying into the outputs of the first call.

    It bakes nothing, so results that differ from a recording graph's show what was baked.
    """

    def __init__(self, scope: CaptureScope) -> None:
        self._scope = scope
        self._compute: Computation | None = None
        self._outputs: dict[str, Tensor] = {}

    def capture(self, compute: Computation) -> Mapping[str, Tensor]:
        self._scope.enter()
        try:
            self._outputs = {name: tensor.clone() for name, tensor in compute().items()}
        finally:
            self._scope.leave()
        self._compute = compute
        return self._outputs

    def replay(self) -> None:
        if self._compute is None:
            raise PhalanxError("a graph was replayed before it was captured")
        with torch.inference_mode():
            for name, tensor in self._compute().items():
                self._outputs[name].copy_(tensor)
