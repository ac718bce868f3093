"""Position counters: the next position of every (request, label), in the KV plan's layout."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from phalanx.device.base import DeviceBackend
from phalanx.step.declaration import Fork, ResourceStep, Segment, StepContext
from phalanx.step.resources.base import BuildInfo, Resource, ResourceConfig, ResourceSpec


@dataclass(frozen=True)
class PositionSpec(ResourceSpec):
    """Declares sequential positions: each token takes the next one of its stream."""

    def build(self, info: BuildInfo) -> Positions:
        return Positions(self.key, info.backend)


@dataclass(frozen=True)
class PositionStep(ResourceStep):
    """The step's rows; with `commit=False` they see positions and do not advance them.

    Forks are those of the step on the cache: a target goes on where its source stands.
    """

    segments: tuple[Segment, ...]
    commit: bool = True
    pre_forks: tuple[Fork, ...] = ()
    post_forks: tuple[Fork, ...] = ()


class Positions(Resource):
    """See the module. `current` is the running step's positions, int64 [tokens]."""

    def __init__(self, key: str, backend: DeviceBackend) -> None:
        self.key = key
        self._backend = backend
        self._lock = threading.Lock()
        self._next: dict[str, dict[str, int]] = {}

    def ingest_request(self, rid: str, config: ResourceConfig | None) -> None:
        with self._lock:
            self._next.setdefault(rid, {})

    def remove_request(self, rid: str) -> None:
        with self._lock:
            self._next.pop(rid, None)

    def plan(self, step: ResourceStep, ctx: StepContext) -> Tensor:
        """Positions of the step's tokens, int64 [tokens], in segment order."""
        assert isinstance(step, PositionStep)
        positions = np.empty(sum(segment.span for segment in step.segments), dtype=np.int64)
        at = 0
        with self._lock:
            forked: dict[tuple[str, str], int] = {}
            for fork in step.pre_forks:
                source = (fork.request_id, fork.source)
                forked[fork.request_id, fork.target] = self._start(source, forked)
            for segment in step.segments:
                start = self._start((segment.request_id, segment.label), forked)
                if segment.span == 1:
                    positions[at] = start
                else:
                    positions[at : at + segment.span] = np.arange(start, start + segment.span)
                at += segment.span
        return self._backend.upload(positions)

    def commit(self, step: ResourceStep, ctx: StepContext) -> None:
        assert isinstance(step, PositionStep)
        with self._lock:
            self._copy(step.pre_forks)
            for segment in step.segments if step.commit else ():
                start = self._position(segment.request_id, segment.label)
                self._next[segment.request_id][segment.label] = start + segment.span
            self._copy(step.post_forks)

    def publish(self, rid: str) -> dict[str, int]:
        """The next position by label."""
        with self._lock:
            return dict(self._next.get(rid, {}))

    def at_rest(self) -> bool:
        with self._lock:
            return not self._next

    def _start(self, stream: tuple[str, str], forked: dict[tuple[str, str], int]) -> int:
        found = forked.get(stream)
        return self._position(*stream) if found is None else found

    def _position(self, rid: str, label: str) -> int:
        return self._next[rid].get(label, 0)

    def _copy(self, forks: tuple[Fork, ...]) -> None:
        for fork in forks:
            self._next[fork.request_id][fork.target] = self._position(fork.request_id, fork.source)
