"""Rows of a batch that share one forward, with what was declared and reserved for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from phalanx.device.base import DeviceEvent
from phalanx.step.declaration import StepContext, SubmoduleStep
from phalanx.step.graphs.regions import RegionRun
from phalanx.step.lease import SlotLease
from phalanx.step.submodule import StepRow


@dataclass
class StepUnit:
    """See the module. `step` is None until it is declared, or where the node declares none."""

    rows: tuple[StepRow, ...]
    inputs: tuple[Any, ...]
    context: StepContext
    step: SubmoduleStep | None = None
    regions: Mapping[str, RegionRun] = field(default_factory=dict)
    """Captured parts of the forward that were reserved with the step."""

    @classmethod
    def of(
        cls,
        walk: str,
        rows: tuple[StepRow, ...],
        inputs: tuple[Any, ...],
        lease: SlotLease | None = None,
    ) -> StepUnit:
        """Rows for which nothing has been done but to lease a captured shape."""
        return cls(rows, inputs, StepContext(tuple(row.request_id for row in rows), walk, lease))

    @property
    def layout(self) -> tuple[tuple[str, int], ...]:
        """The rows in order, as (request, span)."""
        return tuple((row.request_id, row.span) for row in self.rows)

    def split(self) -> list[StepUnit]:
        """One unit a row, from the beginning and without a lease."""
        return [
            StepUnit.of(self.context.walk, (row,), (given,))
            for row, given in zip(self.rows, self.inputs, strict=True)
        ]


@dataclass(frozen=True)
class StagedStep:
    """A unit that was admitted and planned before its turn; `planned` is behind its plans."""

    unit: StepUnit
    planned: DeviceEvent

    @property
    def layout(self) -> tuple[tuple[str, int], ...]:
        """The rows in order, as (request, span): what the plans are for."""
        return self.unit.layout
