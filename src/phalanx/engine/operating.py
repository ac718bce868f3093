"""What whoever runs an engine asks of it beside requests: operations, questions, its memory."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod

import msgspec

from phalanx.engine.dispatcher import RequestDispatcher
from phalanx.engine.resident_memory import rss_bytes
from phalanx.engine.weight_update import WeightUpdate
from phalanx.schema.control import (
    ControlOp,
    LoadWeights,
    Question,
    ReceiveWeights,
    ReplaceWeights,
    SetWeightVersion,
    WeightAnswer,
)
from phalanx.schema.statistics import EngineMemory


class Operating(ABC):
    """The part of an `Engine` for its operator; all methods may be called from any thread."""

    _weight_update: WeightUpdate

    @abstractmethod
    def _started(self) -> RequestDispatcher:
        """Who serves; loads the replicas if that has not been done."""

    @abstractmethod
    def _current(self) -> RequestDispatcher | None:
        """Who serves, unless nothing was started yet; never waits."""

    def control(self, op: ControlOp) -> bool:
        """Apply `op` on every rank of every replica, between two steps; False where it was refused.

        Returns when it has been applied; after `Pause(ABORT)` the aborted requests have ended.
        What does not fit raises `InvalidRequestError`, an update that could not be completed
        `WeightUpdateError`, and memory that could not be had `RequestFailedError`: nothing has
        changed then, and the engine goes on.
        """
        applied = self._started().control(op)
        if applied:
            self._weight_update.version = _version(op) or self._weight_update.version
        return applied

    def ask(self, question: Question) -> tuple[WeightAnswer, ...]:
        """The answer of each replica; errors as those of `control`."""
        return self._started().ask(question)

    @property
    def memory(self) -> EngineMemory:
        """Which parts of its memory it holds; never waits."""
        dispatcher = self._current()
        if dispatcher is None:
            return EngineMemory(rss_bytes=rss_bytes([os.getpid()]))
        return msgspec.structs.replace(dispatcher.memory(), rss_bytes=rss_bytes(dispatcher.pids))

    @property
    def version(self) -> str:
        """Version of the weights that are served."""
        return self._weight_update.version


def _version(op: ControlOp) -> str | None:
    match op:
        case ReplaceWeights(version=version) | LoadWeights(version=version):
            return version
        case ReceiveWeights(version=version) | SetWeightVersion(version=version):
            return version
        case _:
            return None
