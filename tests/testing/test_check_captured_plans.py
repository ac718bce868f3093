"""The check of plans for captured steps passes those that are padded and stay where they are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.device.cpu import CpuBackend
from phalanx.step.declaration import Segment
from phalanx.step.outcomes import AdmitOutcome, AdmitRuntimeError
from phalanx.step.resources.slot_plan import SlotPlan
from phalanx.step.resources.slot_state import SlotState, SlotStateSpec
from phalanx.step.resources.slot_storage import SlotStorage
from phalanx.testing import ConformanceError, check_resource
from tests.step.resources.cases import NODES, SLOTS, TENSORS

BROKEN = []


def broken(message: str):
    def note(cls):
        BROKEN.append(pytest.param(cls, message, id=cls.__name__))
        return cls

    return note


def each(plan: SlotPlan, change) -> SlotPlan:
    return replace(plan, by_label={label: change(rows) for label, rows in plan.by_label.items()})


@broken("static buffers: two plans of one slot are at different addresses")
class PlansIntoNewTensors(SlotState):
    def plan(self, step, ctx):
        return each(super().plan(step, ctx), lambda rows: replace(rows, slots=rows.slots.clone()))


@broken("static buffers: two slots share a buffer")
class HasOneBufferForAllSlots(SlotState):
    def plan(self, step, ctx):
        if ctx.lease is None:
            return super().plan(step, ctx)
        lease, ctx.lease = ctx.lease, replace(ctx.lease, slot=0)
        made = super().plan(step, ctx)
        ctx.lease = lease
        return made


@broken("padding: it wrote to who was there before")
class LeavesTheTail(SlotState):
    def plan(self, step, ctx):
        if ctx.lease is None:
            return super().plan(step, ctx)
        names = {segment.request_id for segment in step.segments}
        others = [rid for rid in self._table.streams if rid not in names and self._table.of(rid)]
        rows = tuple(Segment(rid, 1) for rid in others)
        room = ctx.lease.bucket.rows - len(step.segments)
        return super().plan(replace(step, segments=step.segments + rows[:room]), ctx)


@broken("(padding|at rest)")
class TakesASlotForPadding(SlotState):
    def admit(self, step, ctx):
        outcome = super().admit(step, ctx)
        if outcome.ok and ctx.lease is not None:
            self._table.streams.setdefault("padding", {})
        return outcome


@broken("admit: a step of .* was refused with room")
class NeedsRows(SlotState):
    def admit(self, step, ctx):
        if step.segments:
            return super().admit(step, ctx)
        return AdmitOutcome(ok=False, reason=AdmitRuntimeError("no rows"))


@pytest.mark.parametrize(("cls", "message"), BROKEN)
def test_a_broken_rule_of_captured_plans_is_named(cls, message):
    def factory():
        spec = SlotStateSpec("state", NODES, TENSORS, max_slots=6, num_host_slots=4)
        backend = CpuBackend()
        return cls(spec, SlotStorage(TENSORS, 6, None, backend), backend)

    with pytest.raises(ConformanceError, match=message):
        check_resource(factory, SLOTS)
