"""What a training loop needs of others: the phases of the job, a trainer, and a way for its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from phalanx.distill.sample import Sample
from phalanx.errors import ConfigurationError


@dataclass(frozen=True)
class Checkpoint:
    """The weights after `step` steps, in a directory that engines read. `version` is their name."""

    step: int
    path: Path
    version: str

    def __post_init__(self) -> None:
        if self.step < 0:
            raise ConfigurationError(f"step={self.step} is below 0")
        if not self.version:
            raise ConfigurationError("version is empty; give the weights a name")


class Trainer(Protocol):
    """Trains the student. Its methods block, and are called one at a time, from any thread.

    Its state on a disk is its last checkpoint, which `save` replaces whole or not at all. It holds
    memory of its devices from `load` to `offload`.
    """

    def last(self) -> Checkpoint | None:
        """The last checkpoint, without loading it; None for the weights that engines start with."""
        ...

    def load(self) -> None:
        """Take the devices' memory, with the state of the last checkpoint. Again changes nothing."""
        ...

    def train(self, samples: Sequence[Sample], step: int) -> Mapping[str, float]:
        """One step from these samples, and its numbers. `step` counts from 0."""
        ...

    def save(self, step: int) -> Checkpoint:
        """Write the state after `step` steps, and make it the last checkpoint."""
        ...

    def offload(self) -> None:
        """Give the devices' memory back. Again changes nothing."""
        ...


class Phases(Protocol):
    """Who has the devices; `phalanx.client.AsyncPhaseClient` is one.

    All may be called again with the same meaning.
    """

    async def enter(self, phase: str, batch: str, /) -> object:
        """Returns when the phase's roles serve, or when the trainer may have its devices."""
        ...

    async def leave(self) -> object:
        """To no phase."""
        ...

    async def attach(self, trainer_id: str, /) -> object:
        """This process is the trainer, and holds nothing yet."""
        ...

    async def release(self, trainer_id: str, /) -> object:
        """The trainer has given its memory back."""
        ...


class NoPhases:
    """For engines that serve all the time: there is nothing to wait for."""

    async def enter(self, phase: str, batch: str, /) -> object:
        return None

    async def leave(self) -> object:
        return None

    async def attach(self, trainer_id: str, /) -> object:
        return None

    async def release(self, trainer_id: str, /) -> object:
        return None


class WeightSink(Protocol):
    """Where new weights go after each step."""

    async def push(self, checkpoint: Checkpoint) -> None:
        """Have the student serve it, now or when it wakes. Again changes nothing."""
        ...
