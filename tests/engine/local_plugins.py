"""Plugins that worker processes import, for the tests of local deployments."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from phalanx import (
    AttentionParallelConfig,
    DenseParallelConfig,
    DeviceConfig,
    EngineConfig,
    ParallelConfig,
    RuntimeConfig,
)
from phalanx import parallel as P
from phalanx.testing import Counting, CountingArgs, CountRequest
from phalanx.testing.faulty import Faulty


class RankSum(Faulty):
    """Answers with the sum of its payload over the ranks of its replica."""

    name = "rank_sum"

    def _result(self, request: Any) -> Any:
        import torch

        return float(P.all_reduce(torch.tensor([float(request.payload)]), group="dense_tp"))


class Environment(Faulty):
    """Answers with the environment of its process."""

    name = "environment"

    def _result(self, request: Any) -> Any:
        return dict(os.environ)


class LoggedCounting(Counting):
    """Writes each tick's events to a file of its rank, in the working directory."""

    name = "logged_counting"
    parallel_domains = frozenset({"dense", "attention"})

    def setup(self, args: CountingArgs) -> None:
        super().setup(args)
        self._rank = P.default_mesh().group_rank("world")

    def tick(self):
        events = super().tick()
        with Path(f"counting-{self._rank}.log").open("a", encoding="utf-8") as log:
            log.write(f"{[type(event).__name__ + event.rid for event in events]}\n")
        return events


def cpu(tp: int = 1, **runtime) -> EngineConfig:
    return EngineConfig(
        DeviceConfig("cpu", "float32"),
        RuntimeConfig(num_threads=1, **runtime),
        ParallelConfig(
            dense=DenseParallelConfig(tp_size=tp), attention=AttentionParallelConfig(tp_size=tp)
        ),
    )


class HookedCount(CountRequest, frozen=True, kw_only=True):
    """A count whose pickling first runs `hook`, in the process that pickles it."""

    hook: Callable[[], None]

    def __reduce__(self):
        self.hook()
        return _count, (self.count,)


def _count(count: int) -> CountRequest:
    return CountRequest(count=count)
