"""What an engine asks of the place where its replicas run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from phalanx.engine.executors.base import ReplicaExecutor


class Deployment(Protocol):
    """The replicas of one engine. Nothing runs before `start`."""

    def start(self) -> Sequence[ReplicaExecutor]:
        """Load every replica; called once. Whoever gets an error finds nothing left running."""
        ...

    def close(self) -> None:
        """Give up a start that is on its way, and release what several replicas share.

        Comes before the replicas' own close. Any number of times, from any thread.
        """
        ...
