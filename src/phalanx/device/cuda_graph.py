"""A CUDA graph behind the interface of `DeviceGraph`; all graphs of a backend share a memory pool."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from phalanx.device.graph import CaptureScope, Computation
from phalanx.errors import ConfigurationError, PhalanxError


class CudaGraph:
    """See the module. Captured on a stream of its own, which the current one is ordered around."""

    def __init__(self, scope: CaptureScope, pool: Any) -> None:  # noqa: ANN401
        self._scope = scope
        self._pool = pool
        self._graph: torch.cuda.CUDAGraph | None = None
        self._outputs: dict[str, Tensor] = {}

    def capture(self, compute: Computation) -> Mapping[str, Tensor]:
        self._scope.enter()
        graph = torch.cuda.CUDAGraph()
        try:
            torch.cuda.synchronize()
            # Other threads (transfers, uploads) may go on with what a capture must not do itself.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                self._outputs = dict(compute())
        except RuntimeError as error:
            if "captur" not in str(error):
                raise
            raise ConfigurationError(
                f"a step cannot be captured on this device: {error}; compute on the device only, "
                "without waiting for its values"
            ) from error
        finally:
            self._scope.leave()
        self._graph = graph
        return self._outputs

    def replay(self) -> None:
        if self._graph is None:
            raise PhalanxError("a graph was replayed before it was captured")
        self._graph.replay()
