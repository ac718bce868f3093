"""A policy's steps in order, before it or after it."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.processing.policy.step import ProcessorStep
from phalanx.processing.policy.transition import Transition


@dataclass(frozen=True)
class Pipeline:
    """`name` is the files' own: `policy_preprocessor` or `policy_postprocessor`."""

    name: str
    steps: tuple[ProcessorStep, ...]

    def __call__(self, transition: Transition) -> Transition:
        for step in self.steps:
            transition = step(transition)
        return transition


@dataclass(frozen=True)
class Processors:
    """Both of a policy."""

    before: Pipeline
    after: Pipeline
