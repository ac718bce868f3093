"""Captured parts of an eager forward: reserved with the step around them, replayed inside it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

from torch import Tensor

from phalanx.errors import ConfigurationError
from phalanx.step.declaration import StepContext, SubmoduleStep
from phalanx.step.graphs.captures import Captures
from phalanx.step.graphs.capturing import CaptureTask, Capturing
from phalanx.step.graphs.region_config import RegionConfig, Tensors
from phalanx.step.graphs.slots import NodeSlots
from phalanx.step.graphs.static_inputs import StaticInputs
from phalanx.step.lease import SlotLease
from phalanx.step.outcomes import StepOutcome
from phalanx.step.runner import StepRunner

Layout = Sequence[tuple[str, int]]
"""A step's rows as (request, span)."""


class Region:
    """One region of a node. Its captures are of the bucket's sizes; see `RegionConfig`."""

    def __init__(self, node: str, config: RegionConfig, slots: NodeSlots) -> None:
        self.config = config
        self._slots = slots
        self.captures = Captures(f"region {config.label!r} of node {node!r}", slots)

    @property
    def owner(self) -> str:
        return self.captures.owner

    def capture(self, capturing: Capturing) -> None:
        """Capture all shapes, the largest first."""
        static = StaticInputs(self.owner)
        config = self.config
        for bucket in config.buckets():
            inputs = static.part(config.static_inputs(bucket.rows, bucket.tokens))
            compute = partial(config.compute, inputs)
            task = CaptureTask(bucket, inputs, compute, partial(config.declare_step, (), ()))
            self.captures.add(task, capturing)

    def lease(self, layout: Layout) -> SlotLease | None:
        """A shape that these rows fit into, on the node's next slot."""
        spans = [span for _, span in layout]
        fitting = [
            bucket
            for bucket in self.captures
            if self.config.shapes.takes(spans)
            and bucket.rows >= len(spans)
            and bucket.tokens >= sum(spans)
        ]
        if not fitting:
            return None
        return SlotLease(min(fitting, key=lambda one: (one.tokens, one.rows)), self._slots.take())

    def replay(self, lease: SlotLease, inputs: Tensors) -> Tensors:
        """Stage, with zeros behind the inputs, and replay; the outputs are the caller's own."""
        return self.captures.replay(lease, inputs)

    def await_free(self, lease: SlotLease) -> None:
        self._slots.await_free(lease.slot)


class RegionRun:
    """A region in one step: leased and admitted before it, committed with it.

    It may run several times in a forward, each time by the same plan; `commit` comes once.
    """

    def __init__(
        self, region: Region, lease: SlotLease, layout: Layout, walk: str, runner: StepRunner
    ) -> None:
        self._region = region
        self.lease = lease
        self._layout = tuple(layout)
        self._runner = runner
        # The real rows only: a resource must not take padding for state.
        self._context = StepContext(tuple(rid for rid, _ in layout), walk, lease)
        self._step: SubmoduleStep | None = None
        self._begun = False

    def admit(self, around: Collection[str]) -> StepOutcome:
        """Declare the region's own step and reserve what it needs; `around` are the resources of
        the step around it, which cannot be the region's too.
        """
        spans = [span for _, span in self._layout]
        step = self._region.config.declare_step(self._context.request_ids, spans)
        if step is None:
            return StepOutcome()
        shared = sorted(step.resources.keys() & set(around))
        if shared:
            raise ConfigurationError(
                f"{self._region.owner} and the step around it both use resources {shared}; leave "
                "them to the region while it is leased (lease_before_step, declare_around)"
            )
        self._step = step
        return self._runner.admit(step, self._context)

    def unadmit(self) -> None:
        if self._step is not None:
            self._runner.unadmit(self._step, self._context)

    def commit(self) -> None:
        """The step around it is committed; a region that did not run has no effects to keep."""
        if self._step is None:
            return
        if self._begun:
            self._runner.commit(self._step, self._context)
        else:
            self._runner.unadmit(self._step, self._context)

    def run(self, inputs: Tensors) -> Tensors:
        """Replay the region on `inputs`, of this step's rows and tokens.

        What it returns has no padding, and no other run overwrites it.
        """
        if self._step is not None:
            if not self._begun:
                self._region.await_free(self.lease)
                self._runner.plan(self._step, self._context)
            self._runner.begin(self._step, self._context)
        self._begun = True
        outputs = self._region.replay(self.lease, inputs)
        return {name: self._real(name, one) for name, one in outputs.items()}

    def _real(self, name: str, values: Tensor) -> Tensor:
        bucket, num_tokens = self.lease.bucket, sum(span for _, span in self._layout)
        size, used = bucket.rows, len(self._layout)
        if name in self._region.config.token_outputs:
            size, used = bucket.tokens, num_tokens
        if len(values) != size:
            raise ConfigurationError(
                f"output {name!r} of {self._region.owner} has {len(values)} entries; its bucket has "
                f"{size} (list outputs with one entry a token in token_outputs)"
            )
        return values[:used]
