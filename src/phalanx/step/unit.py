"""Rows of a batch that share one forward, with what was declared and reserved for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from phalanx.device.base import DeviceEvent
from phalanx.step.declaration import StepContext, SubmoduleStep
from phalanx.step.submodule import StepRow


@dataclass
class StepUnit:
    """See the module. `step` is None until it is declared, or where the node declares none."""

    rows: tuple[StepRow, ...]
    inputs: tuple[Any, ...]
    context: StepContext
    step: SubmoduleStep | None = None

    @classmethod
    def of(cls, walk: str, rows: tuple[StepRow, ...], inputs: tuple[Any, ...]) -> StepUnit:
        """Rows for which nothing has been done."""
        return cls(rows, inputs, StepContext(tuple(row.request_id for row in rows), walk))

    def split(self) -> list[StepUnit]:
        """One unit a row, from the beginning."""
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
        return tuple((row.request_id, row.span) for row in self.unit.rows)
