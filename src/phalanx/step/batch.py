"""The record of one step of one node while it runs."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from typing import Any

from phalanx.device.base import DeviceEvent
from phalanx.step.lease import SlotLease
from phalanx.step.outcomes import RefusalReason
from phalanx.step.outputs import NodeOutputs
from phalanx.step.submodule import StepRow
from phalanx.step.unit import StagedStep, StepUnit


class ExecutingBatch:
    """Rows of one (node, walk), what became of each, and three events for whoever follows.

    `launch_started`: inputs are staged and the forward is launched next. `commit_done`: the next
    step may be admitted and planned against this one's state. `outputs_ready`: output tensors
    exist. All are set on every way out of `exec`.
    """

    def __init__(self, node: str, walk: str, rows: Sequence[StepRow]) -> None:
        self.node = node
        self.walk = walk
        self.rows: tuple[StepRow, ...] = tuple(rows)
        self.inputs: tuple[Any, ...] | None = None
        self.running_batched = False
        self.lease: SlotLease | None = None
        self.leased_rows: tuple[tuple[str, int], ...] | None = None
        """The rows, with their spans, that the lease was taken for; None before anybody asked."""
        self.skipped: set[str] = set()
        self.failed_requests: dict[str, Exception] = {}
        self.admit_error: RefusalReason | None = None
        self.failed_resource: str | None = None
        self.outputs: list[NodeOutputs] = []
        self.completed: DeviceEvent | None = None
        """Behind all that the step computed; None until then."""
        self.staged: StagedStep | None = None
        """The step as it was planned before its turn."""
        self.promoted: StepUnit | None = None
        """Keeps plans that were made on another stream as long as the forward may read them."""
        self.launch_started = threading.Event()
        self.outputs_ready = threading.Event()
        self.commit_done = threading.Event()
        self._discarded: frozenset[str] = frozenset()

    @property
    def request_ids(self) -> tuple[str, ...]:
        return tuple(row.request_id for row in self.rows)

    @property
    def shares_forward(self) -> bool:
        """Whether the rows run as one."""
        return self.running_batched or len(self.rows) == 1 or self.lease is not None

    @property
    def preplan_is_stale(self) -> bool:
        """Whether the staged step is for other rows, other spans or another order."""
        staged = self.staged
        # The very same rows, as nearly always, need no look into each.
        return staged is not None and staged.unit.rows != self.rows and staged.layout != self.layout

    def drop_rows(self, rids: Collection[str]) -> None:
        """Leave requests out of a step that has not run, with their inputs."""
        kept = [index for index, row in enumerate(self.rows) if row.request_id not in rids]
        if self.inputs is not None:
            self.inputs = tuple(self.inputs[index] for index in kept)
        self.rows = tuple(self.rows[index] for index in kept)

    def discard(self, rids: Collection[str]) -> None:
        """Requests whose part in a step that has run counts for nothing."""
        self._discarded |= frozenset(rids)

    def register_inputs(self, rows: Sequence[StepRow], inputs: Sequence[Any]) -> None:
        """Keep the rows that take part, with one input each."""
        assert len(rows) == len(inputs)
        self.rows, self.inputs = tuple(rows), tuple(inputs)

    def register_failure(self, rid: str, error: Exception) -> None:
        """A request failed in this step; its first error is kept."""
        self.failed_requests.setdefault(rid, error)

    def register_admit_error(self, reason: RefusalReason, resource: str | None) -> None:
        self.admit_error, self.failed_resource = reason, resource

    def live_rows(self) -> tuple[StepRow, ...]:
        """The rows that have not failed and count."""
        gone = self.failed_requests.keys() | self._discarded
        return tuple(row for row in self.rows if row.request_id not in gone)

    @property
    def layout(self) -> tuple[tuple[str, int], ...]:
        """The rows in order, as (request, span)."""
        return tuple((row.request_id, row.span) for row in self.rows)

    def release_waiters(self) -> None:
        self.launch_started.set()
        self.commit_done.set()
        self.outputs_ready.set()
