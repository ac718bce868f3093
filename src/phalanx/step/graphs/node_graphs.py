"""All that is captured of one node: whole forwards and regions, on one set of slots."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from phalanx.device.base import DeviceBackend
from phalanx.step.batch import ExecutingBatch
from phalanx.step.graphs.capturing import CaptureReport, Capturing
from phalanx.step.graphs.compiling import Forward, compiled
from phalanx.step.graphs.graph_runner import GraphRunner
from phalanx.step.graphs.regions import Layout, Region, RegionRun
from phalanx.step.graphs.slots import NodeSlots
from phalanx.step.lease import BufferClaim, SlotLease
from phalanx.step.outputs import NodeOutputs
from phalanx.step.resources.base import Resource
from phalanx.step.runner import StepRunner
from phalanx.step.submodule import NodeSubmodule


class NodeGraphs:
    """See the module. Before `capture`, and where the device does not capture, every step is eager."""

    def __init__(
        self,
        node: str,
        submodule: NodeSubmodule,
        resources: Mapping[str, Resource],
        runner: StepRunner,
        backend: DeviceBackend,
        slots: NodeSlots,
    ) -> None:
        self._submodule = submodule
        self._resources = resources
        self._runner = runner
        self._backend = backend
        self._slots = slots
        self._forward_batched: Forward = submodule.forward_batched
        self._configs = tuple(submodule.capture_configs()) if backend.captures else ()
        self._graphs = GraphRunner(node, submodule, self._configs, slots, self.forward_batched)
        configs = submodule.regions() if backend.captures else ()
        self._regions = {config.label: Region(node, config, slots) for config in configs}
        self._all = [self._graphs.captures, *(one.captures for one in self._regions.values())]

    @property
    def has_regions(self) -> bool:
        """Whether some part of the forward is captured on its own."""
        return any(region.captures for region in self._regions.values())

    def prepare_for_capture(self) -> None:
        """Have the node's resources take their static buffers."""
        shapes = [config.shapes for config in self._configs]
        shapes += [region.config.shapes for region in self._regions.values()]
        if not shapes:
            return
        claim = BufferClaim(
            len(self._slots.numbers),
            max(one.max_rows for one in shapes),
            max(one.max_tokens for one in shapes),
        )
        for resource in self._resources.values():
            resource.claim_buffers(claim)

    def capture(self, capturing: Capturing) -> CaptureReport:
        """Capture everything anew."""
        self.drop()
        self._graphs.capture(capturing, partial(compiled, backend=self._backend, captured=True))
        for region in self._regions.values():
            region.capture(capturing)
        buckets = tuple(bucket for one in self._all for bucket in one)
        refused = {bucket: why for one in self._all for bucket, why in one.refused.items()}
        return CaptureReport(buckets, refused)

    def compile_eager(self) -> None:
        """Compile the eager forward, if the node wants it; after captures, which do it themselves."""
        if self._submodule.compiles:
            self._forward_batched = compiled(
                self._submodule.forward_batched, self._backend, captured=False
            )

    def drop(self) -> None:
        """Forget all captures."""
        for captures in self._all:
            captures.drop()

    def max_batch_size(self, walk: str) -> int | None:
        """The node's limit, and that of captures which cap what is eager."""
        limits = (self._submodule.max_batch_size(walk), self._graphs.max_batch_size(walk))
        return min((limit for limit in limits if limit is not None), default=None)

    def lease(self, batch: ExecutingBatch) -> SlotLease | None:
        """The shape and slot on which the batch as it is now replays; None to compute it eagerly.

        A lease that was taken for other rows is taken anew, on the same slot.
        """
        if not self._graphs.captures or not batch.rows:
            batch.lease = batch.leased_rows = None
        elif batch.leased_rows != batch.layout:
            earlier, batch.lease, batch.leased_rows = batch.lease, None, None
            key = self._submodule.capture_key(batch.walk, batch.rows)
            spans = [row.span for row in batch.rows]
            prepared = batch.inputs is not None
            bucket = self._graphs.bucket_of(batch.walk, key, spans, prepared=prepared)
            if bucket is not None:
                slot = self._slots.take() if earlier is None else earlier.slot
                batch.lease = SlotLease(bucket, slot)
            # What was asked too early to know is asked again.
            if prepared or bucket is not None:
                batch.leased_rows = batch.layout
        return batch.lease

    def lease_regions(self, walk: str, layout: Layout) -> dict[str, RegionRun]:
        """The regions that have a shape for these rows, none of them admitted yet."""
        leases = {label: region.lease(layout) for label, region in self._regions.items()}
        return {
            label: RegionRun(self._regions[label], lease, layout, walk, self._runner)
            for label, lease in leases.items()
            if lease is not None
        }

    def leased_before_step(self, runs: Mapping[str, RegionRun]) -> dict[str, SlotLease]:
        """The leases that the step around regions is declared with."""
        return {
            label: run.lease
            for label, run in runs.items()
            if self._regions[label].config.lease_before_step
        }

    def await_free(self, lease: SlotLease | None) -> None:
        """Let the current stream wait until the slot may be planned into."""
        if lease is not None:
            self._slots.await_free(lease.slot)

    def replay(
        self, lease: SlotLease, prepared: object, launch_started: threading.Event
    ) -> NodeOutputs:
        return self._graphs.replay(lease, prepared, launch_started)

    def forward_batched(self, prepared: Any) -> NodeOutputs:  # noqa: ANN401
        """Compute all rows, under the node's autocast."""
        dtype = self._submodule.autocast_dtype
        if dtype is None:
            return self._forward_batched(prepared)
        # Without its cache, which would keep what a capture computes.
        with torch.autocast(self._backend.device.type, dtype, cache_enabled=False):
            return self._forward_batched(prepared)

    def forward(self, prepared: Any) -> NodeOutputs:  # noqa: ANN401
        """Compute a single row, under the node's autocast."""
        dtype = self._submodule.autocast_dtype
        if dtype is None:
            return self._submodule.forward(prepared)
        with torch.autocast(self._backend.device.type, dtype, cache_enabled=False):
            return self._submodule.forward(prepared)
