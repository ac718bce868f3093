"""What the conformance check asks of a resource's plans for captured steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass

import torch
from torch import Tensor

from phalanx.step.declaration import StepContext
from phalanx.step.lease import BucketKey, BufferClaim, SlotLease
from phalanx.testing.conformance import require
from phalanx.testing.resource_case import WALK, ResourceBed, ResourceDrive, require_same

_ROWS = 4


def check_captured_plans(bed: ResourceBed, row_tokens: int, most: int) -> None:
    """Plans under a lease are padded, hold nothing for padding, and stay where they are."""
    leases = [SlotLease(BucketKey(WALK, _ROWS, _ROWS * row_tokens), slot) for slot in range(2)]
    _check_padding(bed, leases[0], most)
    _check_without_rows(bed, leases[0], most)
    _check_addresses(bed, leases)
    _check_slots(bed, leases)


def _drive(bed: ResourceBed, lease: SlotLease, *rids: str) -> ResourceDrive:
    drive = bed.drive(*rids)
    for resource in drive.resources.values():
        resource.claim_buffers(BufferClaim(2, lease.bucket.rows, lease.bucket.tokens))
    return drive


def _check_padding(bed: ResourceBed, lease: SlotLease, most: int) -> None:
    drive = _drive(bed, lease, "a", "b")
    room = drive.capacity(most)
    for _ in range(2):
        drive.run(*drive.admitted("b", "a", lease=lease))
    for rid in ("a", "b"):
        where = f"padding: {rid!r} differs where rows of a captured step are padded"
        require_same(drive.look(rid), bed.expected(rid, 2), where)
    drive.run(*drive.admitted("a", lease=lease))
    require_same(drive.look("a"), bed.expected("a", 3), "padding: what was planned before is left")
    require_same(drive.look("b"), bed.expected("b", 2), "padding: it wrote to who was there before")
    drive.close("a", "b")
    drive.require_rest("after captured steps: padding may hold nothing")
    require(drive.capacity(most) == room, "padding: there is less room after captured steps")


def _check_without_rows(bed: ResourceBed, lease: SlotLease, most: int) -> None:
    drive = _drive(bed, lease, "a")
    drive.step("a")
    before, room = drive.look("a"), drive.capacity(most)
    step, ctx = drive.admitted(lease=lease)
    drive.begin(step, ctx)
    drive.compute(ctx)
    drive.runner.unadmit(step, ctx)
    where = "capture: a step without rows changed"
    require_same(drive.look("a"), before, f"{where} a request")
    require(drive.capacity(most) == room, f"{where} the room there is")
    drive.close("a")
    drive.require_rest("after a step without rows")


def _planned(drive: ResourceDrive, lease: SlotLease, *rids: str) -> StepContext:
    step, ctx = drive.admitted(*rids, lease=lease)
    with torch.inference_mode():
        drive.runner.plan(step, ctx)
    drive.runner.unadmit(step, ctx)
    return ctx


def _check_addresses(bed: ResourceBed, leases: list[SlotLease]) -> None:
    drive = _drive(bed, leases[0], "a", "b")
    tested = drive.tested.key
    first, second, other = (
        _addresses(_planned(drive, lease, *rids).plan_results[tested])
        for lease, rids in ((leases[0], "ab"), (leases[0], "b"), (leases[1], "ab"))
    )
    require(first == second, "static buffers: two plans of one slot are at different addresses")
    require(not first & other, "static buffers: two slots share a buffer")


def _check_slots(bed: ResourceBed, leases: list[SlotLease]) -> None:
    """The plan of a step on one slot leaves what another slot's replay reads."""
    drive = _drive(bed, leases[0], "a", "b")
    drive.step("a", "b")
    first, now = drive.admitted("a", lease=leases[0])
    drive.begin(first, now)
    read = {tensor.data_ptr(): tensor.clone() for tensor in _tensors(now.plan_results)}
    second, later = drive.admitted("b", lease=leases[1])
    with torch.inference_mode():
        drive.runner.plan_ahead(second, later)
    for tensor in _tensors(now.plan_results):
        same = torch.equal(tensor, read[tensor.data_ptr()])
        require(same, "static buffers: a plan changed what another slot's replay reads")
    drive.finish(first, now)
    drive.run(second, later)
    for rid in ("a", "b"):
        require_same(drive.look(rid), bed.expected(rid, 2), f"static buffers: {rid!r} differs")


def _addresses(plan: object) -> set[int]:
    return {tensor.data_ptr() for tensor in _tensors(plan) if tensor.numel()}


def _tensors(plan: object) -> Iterator[Tensor]:
    """Every tensor in a plan, however deep."""
    if isinstance(plan, Tensor):
        yield plan
    elif isinstance(plan, Mapping):
        for part in plan.values():
            yield from _tensors(part)
    elif isinstance(plan, (tuple, list)):
        for part in plan:
            yield from _tensors(part)
    elif is_dataclass(plan):
        for one in fields(plan):
            yield from _tensors(getattr(plan, one.name))
