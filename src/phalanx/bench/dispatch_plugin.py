"""A plain `Entry` that costs nothing itself, so that what is measured is the way to it and back."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.bench.busy_loop import burn
from phalanx.engine_config import EntryArgs
from phalanx.plugin import Entry


@dataclass(frozen=True)
class DispatchArgs(EntryArgs):
    """Nothing to choose."""


@dataclass(frozen=True)
class DispatchRequest:
    """An observation: `images`, `state` and `reply_elements`, the length of its answer.

    Before it is answered, the step computes `num_iterations` of a busy loop, and waits until the
    FIFO `hold` was opened for writing and closed.
    """

    observation: dict[str, Any]
    num_iterations: int = 0
    hold: str | None = None


@dataclass(frozen=True)
class DispatchOutput:
    """The action begins with the first element of the state; `pid` is the worker's."""

    action: npt.NDArray[np.float32]
    pid: int


class Dispatch(Entry):
    """Answers an observation with an action."""

    name = "bench_dispatch"
    args_cls = DispatchArgs
    request_cls = DispatchRequest
    output_cls = DispatchOutput

    def setup(self, args: DispatchArgs) -> None:
        self._pid = os.getpid()

    def step(self, request: DispatchRequest) -> DispatchOutput:
        if request.hold is not None:
            Path(request.hold).read_bytes()
        if request.num_iterations:
            burn(request.num_iterations)
        observation = request.observation
        action = np.full(observation["reply_elements"], observation["state"][0], np.float32)
        return DispatchOutput(action, self._pid)
