"""Captures one shape on every slot, on all ranks of a replica, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from phalanx.device.base import DeviceBackend
from phalanx.device.graph import DeviceGraph
from phalanx.errors import ConfigurationError
from phalanx.step.attempt import attempt
from phalanx.step.declaration import StepContext, SubmoduleStep
from phalanx.step.lease import BucketKey, SlotLease
from phalanx.step.runner import StepRunner

Agree = Callable[[Sequence[bool]], Sequence[bool]]
"""Given whether each of some things worked here, whether it worked on every rank."""

_WARM_UP_RUNS = 2
"""Eager runs before a capture: libraries set themselves up in the first ones."""


def agree_alone(worked: Sequence[bool]) -> Sequence[bool]:
    """A single rank's agreement with itself."""
    return worked


@dataclass(frozen=True)
class CaptureTask:
    """One shape to capture: what it computes from which inputs, and the step it is computed in."""

    bucket: BucketKey
    inputs: Mapping[str, Tensor]
    compute: Callable[[], Mapping[str, Tensor]]
    declare: Callable[[], SubmoduleStep | None]
    padding: Mapping[str, Tensor] = field(default_factory=dict)
    """What inputs hold beyond a step's own; zeros where nothing is said."""


@dataclass(frozen=True)
class Captured:
    """One shape on one slot."""

    graph: DeviceGraph
    inputs: Mapping[str, Tensor]
    padding: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]

    def replay(self) -> dict[str, Tensor]:
        """Compute again; copies of the outputs, since captures share memory: the replay of another
        one may overwrite what this one has computed.
        """
        self.graph.replay()
        return {name: values.clone() for name, values in self.outputs.items()}


@dataclass(frozen=True)
class CaptureReport:
    """What of a node has been captured, and why the rest has not."""

    captured: tuple[BucketKey, ...] = ()
    refused: Mapping[BucketKey, str] | None = None


class Capturing:
    """See the module. A step of no rows is planned for each run, and undone after it."""

    def __init__(self, runner: StepRunner, backend: DeviceBackend, agree: Agree) -> None:
        self._runner = runner
        self._backend = backend
        self._agree = agree

    def capture(self, task: CaptureTask, slots: Sequence[int]) -> dict[int, Captured] | str:
        """The shape by slot, or why it could not be captured."""
        captured: dict[int, Captured] = {}
        refused = ""
        with torch.inference_mode():
            for slot in slots:
                made = attempt(partial(self._captured, task, SlotLease(task.bucket, slot)))
                if made.value is None:
                    refused = f"{type(made.error).__name__}: {made.error}"
                    break
                captured[slot] = made.value
        if self._agree([not refused])[0]:
            return captured
        return refused or "another rank could not capture it"

    def _captured(self, task: CaptureTask, lease: SlotLease) -> Captured:
        for _ in range(_WARM_UP_RUNS):
            with self._planned(task, lease):
                task.compute()
        graph = self._backend.create_graph()
        with self._planned(task, lease):
            outputs = graph.capture(task.compute)
        return Captured(graph, task.inputs, task.padding, outputs)

    @contextmanager
    def _planned(self, task: CaptureTask, lease: SlotLease) -> Iterator[None]:
        step = task.declare()
        if step is None:
            yield
            return
        if step.key != lease.bucket.key:
            raise ConfigurationError(
                f"a capture of walk {lease.bucket.walk!r} has key {lease.bucket.key!r} and its "
                f"step {step.key!r}; declare_capture must declare with the key that it is given"
            )
        context = StepContext((), lease.bucket.walk, lease)
        try:
            outcome = self._runner.admit(step, context)
            if not outcome.ok:
                raise ConfigurationError(
                    f"resource {outcome.failed_resource!r} refuses a step without rows: "
                    f"{outcome.outcome.reason}"
                )
            self._runner.plan(step, context)
            self._runner.begin(step, context)
            yield
        finally:
            self._runner.unadmit(step, context)
