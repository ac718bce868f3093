"""The record of one step of one node while it runs."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from phalanx.step.lease import SlotLease
from phalanx.step.outcomes import RefusalReason
from phalanx.step.outputs import NodeOutputs
from phalanx.step.submodule import StepRow


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
        self.launch_started = threading.Event()
        self.outputs_ready = threading.Event()
        self.commit_done = threading.Event()

    @property
    def request_ids(self) -> tuple[str, ...]:
        return tuple(row.request_id for row in self.rows)

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
        """The rows that have not failed."""
        return tuple(row for row in self.rows if row.request_id not in self.failed_requests)

    @property
    def layout(self) -> tuple[tuple[str, int], ...]:
        """The rows in order, as (request, span)."""
        return tuple((row.request_id, row.span) for row in self.rows)

    def release_waiters(self) -> None:
        self.launch_started.set()
        self.commit_done.set()
        self.outputs_ready.set()
