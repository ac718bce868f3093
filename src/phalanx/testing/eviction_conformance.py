"""What the conformance check asks of a resource that moves requests to the host and back."""

from __future__ import annotations

from phalanx.step.outcomes import RequestOffloading
from phalanx.step.resources.base import Evictable
from phalanx.testing.conformance import ConformanceError, require
from phalanx.testing.resource_case import ResourceBed, ResourceDrive, require_same


def check_eviction(bed: ResourceBed, most: int) -> None:
    """Offload, refuse, reload, and be as before. The bed's resource must have room on the host for
    two requests of two steps each.
    """
    _check_round_trip(bed, most)
    _check_in_flight(bed)
    _check_no_room_to_return(bed, most)
    _check_removed_while_away(bed, most)


def _evictable(drive: ResourceDrive) -> Evictable:
    assert isinstance(drive.tested, Evictable)
    return drive.tested


def _away(drive: ResourceDrive, rid: str) -> None:
    """Offload a request of which something is held."""
    resource = _evictable(drive)
    held = resource.reclaimable(rid)
    require(held > 0, f"eviction: nothing of {rid!r} is reclaimable after a step")
    freed = resource.offload(rid)
    require(
        freed == held,
        f"eviction: offload freed {freed} of the {held} that were reclaimable, with room on the "
        "host for all",
    )
    require(resource.is_offloaded(rid), "eviction: is_offloaded is False after an offload")
    require(resource.reclaimable(rid) == 0, "eviction: something is reclaimable twice")
    require(resource.offload(rid) == 0, "eviction: a second offload freed something again")


def _check_round_trip(bed: ResourceBed, most: int) -> None:
    drive = bed.drive("a", "b")
    resource = _evictable(drive)
    for rid in ("nobody", "a"):
        require(not resource.is_offloaded(rid), f"eviction: {rid!r} is offloaded from the start")
        require(resource.reclaimable(rid) == 0, f"eviction: {rid!r} holds something from the start")
        require(resource.reload(rid), f"eviction: reload of {rid!r}, who is here, is False")
    drive.step("a", "b")
    before, beside, room = drive.look("a"), drive.look("b"), drive.capacity(most)
    require(resource.reload("a"), "eviction: reload of a request that is here is False")
    require(drive.look("a") == before, "eviction: reload of a request that is here changed it")
    _away(drive, "a")
    freed = drive.capacity(most)
    require(freed > room or room == most, "eviction: an offload made no room for others")
    ctx = drive.context("a")
    reason = drive.refused(drive.declared("a"), ctx)
    if not isinstance(reason, RequestOffloading):
        raise ConformanceError(
            f"eviction: a step of an offloaded request was answered {reason!r}, not "
            "RequestOffloading"
        )
    require(not ctx.reservations, "eviction: a step refused for an offload left a reservation")
    require(drive.look("b") == beside, "eviction: an offload changed a neighbour")
    drive.step("b")
    require(resource.reload("a"), "eviction: reload is False with room for all")
    require(not resource.is_offloaded("a"), "eviction: is_offloaded is True after a reload")
    require(drive.look("a") == before, "eviction: a reload brought back something else")
    require(resource.reclaimable("a") > 0, "eviction: nothing is reclaimable after a reload")
    drive.step("a")
    require_same(drive.look("a"), bed.expected("a", 2), "eviction: a step after a reload differs")
    drive.close("a", "b")
    drive.require_rest("after an offload and a reload")
    require(drive.capacity(most) >= freed, "eviction: a round trip left less room behind")


def _check_in_flight(bed: ResourceBed) -> None:
    drive = bed.drive("a")
    resource = _evictable(drive)
    drive.step("a")
    before = drive.look("a")
    step, ctx = drive.admitted("a")
    require(resource.offload("a") == 0, "eviction: a request was moved while a step ran")
    require(not resource.is_offloaded("a"), "eviction: a refused offload counts as one")
    drive.runner.unadmit(step, ctx)
    require(drive.look("a") == before, "eviction: a refused offload changed the request")
    require(resource.offload("a") > 0, "eviction: a step given up still blocks an offload")
    require(resource.reload("a"), "eviction: reload is False with room for all")
    drive.step("a")
    drive.close("a")
    drive.require_rest("after an offload was refused")


def _check_no_room_to_return(bed: ResourceBed, most: int) -> None:
    drive = bed.drive("a")
    resource = _evictable(drive)
    drive.step("a")
    before = drive.look("a")
    _away(drive, "a")
    fillers = drive.fill(most)
    if len(fillers) < most:
        require(not resource.reload("a"), "eviction: a reload succeeded without room")
        require(resource.is_offloaded("a"), "eviction: a refused reload lost the request")
    drive.close(*fillers)
    require(resource.reload("a"), "eviction: reload is False after room was made")
    require_same(drive.look("a"), before, "eviction: a late reload brought back something else")
    drive.close("a")
    drive.require_rest("after a reload was refused")


def _check_removed_while_away(bed: ResourceBed, most: int) -> None:
    drive = bed.drive()
    room = drive.capacity(most)
    for _ in range(3):
        drive.open("a")
        drive.step("a")
        _away(drive, "a")
        drive.close("a")
        drive.require_rest("after an offloaded request was removed")
    require(drive.capacity(most) == room, "eviction: a request removed while away left less room")
