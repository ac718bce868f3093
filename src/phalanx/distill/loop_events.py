"""What a training loop tells while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class PhaseEntered:
    """Its roles serve, or the trainer has its devices."""

    phase: str
    batch_id: str


@dataclass(frozen=True)
class SamplesDone:
    """`what` is `collect`, `judge`, `teacher` or `student`."""

    step: int
    what: str
    done: int
    total: int


@dataclass(frozen=True)
class StepTrained:
    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class WeightsPushed:
    """The student serves the weights after `step` steps, now or when it wakes."""

    step: int
    version: str


@dataclass(frozen=True)
class StepEnded:
    """Nothing of the step is left to be done."""

    step: int


LoopEvent = PhaseEntered | SamplesDone | StepTrained | WeightsPushed | StepEnded


def no_event(event: LoopEvent) -> None:
    """For callers that show none."""
