"""A check that any `Resource` keeps the contract which the step engine relies on."""

from __future__ import annotations

from collections.abc import Callable

from phalanx.step.outcomes import AllocationFailed
from phalanx.step.resources.base import Evictable
from phalanx.testing.captured_conformance import check_captured_plans
from phalanx.testing.conformance import ConformanceError, require
from phalanx.testing.eviction_conformance import check_eviction
from phalanx.testing.resource_case import (
    ResourceBed,
    ResourceCase,
    ResourceDrive,
    ResourceFactory,
    require_same,
)

MOST = 12
"""Requests after which a resource counts as one that cannot be exhausted."""


def check_resource(resource_factory: ResourceFactory, case: ResourceCase) -> None:
    """Drive a resource through all that the engine may do to it, or raise `ConformanceError`.

    `resource_factory` returns a new resource with room for at least four requests of two steps each;
    or several in the order of their dependencies, of which the last is the one to check. It should
    be small: what it can hold is filled up again and again.
    """
    bed = ResourceBed(resource_factory, case)
    for rule in _RULES:
        rule(bed)
    if case.fork is not None:
        _check_forks(bed)
    tested = bed.drive().tested
    if tested.plans_ahead:
        _check_planning_ahead(bed)
    if isinstance(tested, Evictable):
        check_eviction(bed, MOST)
    if case.tags:
        _check_release(bed)
    if case.row_tokens is not None:
        check_captured_plans(bed, case.row_tokens, MOST)


def _check_steps(bed: ResourceBed) -> None:
    """Steps change something, and a request is the same whoever shares its steps."""
    require(
        bed.expected("a", 1) == bed.expected("a", 1),
        "case: two new resources differ after the same step; read and compute must be repeatable",
    )
    for order in (("a", "b"), ("b", "a")):
        drive = bed.drive("a", "b")
        for _ in range(2):
            drive.step(*order)
        for rid in order:
            require_same(
                drive.look(rid), bed.expected(rid, 2), f"batching: {rid!r} differs from alone"
            )
        drive.close(*order)
        drive.require_rest("after all requests were removed")


def _check_ingest(bed: ResourceBed) -> None:
    drive = bed.drive("a")
    drive.step("a")
    drive.open("a")
    require_same(
        drive.look("a"), bed.expected("a", 1), "ingest is idempotent: a second one changed state"
    )
    drive.step("a")
    require_same(
        drive.look("a"), bed.expected("a", 2), "ingest is idempotent: the step after it differs"
    )
    drive.close("a")
    drive.require_rest("after a request that was ingested twice")


def _check_remove(bed: ResourceBed) -> None:
    drive = bed.drive("a")
    room = drive.capacity(MOST)
    drive.step("a")
    try:
        drive.close("never opened")
        drive.close("a", "a")
    except Exception as error:
        raise ConformanceError(
            f"remove tolerates unknown ids: it raised {error!r} for one that is not there"
        ) from error
    drive.require_rest("after a request was removed twice")
    drive.open("a")
    require(drive.capacity(MOST) == room, "remove frees all: there is less room than before")
    drive.step("a")
    require_same(
        drive.look("a"), bed.expected("a", 1), "remove frees all: a new request finds old state"
    )


def _check_unadmit(bed: ResourceBed) -> None:
    """At whatever point a step is given up, it was never there."""
    stages: dict[str, Callable[[ResourceDrive], None]] = {
        "before it was admitted": lambda drive: drive.runner.unadmit(
            drive.declared("a"), drive.context("a")
        ),
        "after it was admitted": lambda drive: _give_up(drive, 0),
        "after it was planned": lambda drive: _give_up(drive, 1),
        "after it was begun": lambda drive: _give_up(drive, 2),
        "after its forward": lambda drive: _give_up(drive, 3),
    }
    for num_steps in (0, 1):
        for stage, give_up in stages.items():
            drive = bed.drive("a")
            room = drive.capacity(MOST)
            for _ in range(num_steps):
                drive.step("a")
            before = drive.look("a")
            held = drive.capacity(MOST)
            for _ in range(3):
                give_up(drive)
            where = f"unadmit leaves no trace: a step given up {stage}"
            require_same(drive.look("a"), before, where)
            require(drive.capacity(MOST) == held, f"{where} changed the room for others")
            drive.step("a")
            require_same(
                drive.look("a"), bed.expected("a", num_steps + 1), f"{where} changed the next"
            )
            drive.close("a")
            drive.require_rest(f"after a step was given up {stage}")
            require(drive.capacity(MOST) == room, f"{where} left less room behind")


def _give_up(drive: ResourceDrive, stage: int) -> None:
    step, ctx = drive.admitted("a")
    if stage == 1:
        drive.runner.plan(step, ctx)
    elif stage >= 2:
        drive.begin(step, ctx)
    if stage == 3:
        drive.compute(ctx)
    for _ in range(2):
        drive.runner.unadmit(step, ctx)
    require(not ctx.reservations, "unadmit leaves no trace: the context still holds a reservation")


def _check_admitted_twice(bed: ResourceBed) -> None:
    """A step that is driven again asks again, with the same context."""
    where = "admit again: a step that was admitted twice"
    for given_up in (True, False):
        drive = bed.drive("a")
        room = drive.capacity(MOST)
        step, ctx = drive.admitted("a")
        require(drive.refused(step, ctx) is None, f"{where} was refused the second time")
        if given_up:
            drive.runner.unadmit(step, ctx)
            require(drive.capacity(MOST) == room, f"{where} and given up left less room behind")
            drive.step("a")
        else:
            drive.run(step, ctx)
        require_same(drive.look("a"), bed.expected("a", 1), f"{where} changed what came of it")
        drive.close("a")
        drive.require_rest("after a step was admitted twice")
        require(drive.capacity(MOST) == room, f"{where} left less room behind")


def _check_return_in_flight(bed: ResourceBed) -> None:
    """Who left in a step and came back has nothing to do with that step."""
    drive = bed.drive("a")
    step, ctx = drive.admitted("a")
    drive.begin(step, ctx)
    drive.close("a")
    drive.open("a")
    drive.step("a")
    drive.runner.unadmit(step, ctx)
    where = "return in a step: the step of its former life changed a request"
    require_same(drive.look("a"), bed.expected("a", 1), where)
    drive.step("a")
    require_same(drive.look("a"), bed.expected("a", 2), where)
    drive.close("a")
    drive.require_rest("after a request left and came back while a step ran")


def _check_commit(bed: ResourceBed) -> None:
    drive = bed.drive("a")
    step, ctx = drive.admitted("a")
    drive.run(step, ctx)
    drive.runner.unadmit(step, ctx)
    require_same(
        drive.look("a"), bed.expected("a", 1), "commit: an unadmit behind it undid the step"
    )


def _check_removal_in_flight(bed: ResourceBed) -> None:
    for begun in (False, True):
        drive = bed.drive("a", "b")
        room = drive.capacity(MOST)
        step, ctx = drive.admitted("a", "b")
        if begun:
            drive.begin(step, ctx)
            drive.compute(ctx)
        drive.close("a")
        drive.runner.unadmit(step, ctx)
        drive.step("b")
        where = "removal in a step: a neighbour's state differs"
        require_same(drive.look("b"), bed.expected("b", 1), where)
        drive.close("b")
        drive.require_rest("after a request was removed in its step, and the step given up")
        require(drive.capacity(MOST) == room, "removal in a step: there is less room than before")


def _check_exhaustion(bed: ResourceBed) -> None:
    """A refused admit says so, takes nothing, and works once somebody has left."""
    drive = bed.drive()
    rids = [f"r{index}" for index in range(MOST)]
    for count, rid in enumerate(rids):
        drive.open(rid)
        step, ctx = drive.declared(rid), drive.context(rid)
        reason = drive.refused(step, ctx)
        if reason is None:
            drive.run(step, ctx)
            continue
        if not isinstance(reason, AllocationFailed):
            raise ConformanceError(f"exhaustion: the refusal is {reason!r}, not AllocationFailed")
        require(reason.pages_short >= 1, f"exhaustion: {reason!r} says that nothing is missing")
        require(not ctx.reservations, "refused admit: it left a reservation")
        require(count >= 4, "case: the resource must have room for four requests of two steps")
        _check_partial_refusal(drive, rids[0], rid)
        for other in rids[:count]:
            require_same(
                drive.look(other), bed.expected(other, 1), "refused admit: it changed a request"
            )
        drive.close(rids[0])
        drive.step(rid)
        require_same(
            drive.look(rid), bed.expected(rid, 1), "refused admit: it changed its own request"
        )
        break
    drive.close(*rids)
    drive.require_rest("after it was exhausted and emptied")


def _check_partial_refusal(drive: ResourceDrive, resident: str, newcomer: str) -> None:
    """A step whose second row finds no room leaves the first as it was."""
    drive.open("guest")
    before = drive.look(resident)
    for rids in ((newcomer, "guest"), (resident, newcomer, "guest")):
        ctx = drive.context(*rids)
        reason = drive.refused(drive.declared(*rids), ctx)
        require(reason is not None, "exhaustion: a larger step fits where a smaller one does not")
        require(not ctx.reservations, "refused admit: it left a reservation")
        require_same(drive.look(resident), before, "refused admit: it changed one of its rows")
    drive.close("guest")


def _check_planning_ahead(bed: ResourceBed) -> None:
    """The next step is planned while this one is computed, and may be given up."""
    for given_up in (False, True):
        drive = bed.drive("a", "b")
        drive.step("a", "b")
        first, now = drive.admitted("a")
        drive.begin(first, now)
        second, later = drive.admitted("b")
        drive.runner.plan_ahead(second, later)
        if given_up:
            drive.runner.unadmit(second, later)
        drive.finish(first, now)
        where = "plan does not disturb a begun step"
        require_same(drive.look("a"), bed.expected("a", 2), f"{where}: its state differs")
        if given_up:
            require_same(
                drive.look("b"), bed.expected("b", 1), f"{where}: one given up left a trace"
            )
            drive.step("b")
        else:
            drive.run(second, later)
        require_same(drive.look("b"), bed.expected("b", 2), f"{where}: the planned step differs")
        drive.close("a", "b")
        drive.require_rest("after a step was planned ahead")


def _check_forks(bed: ResourceBed) -> None:
    where = "forks are undone"
    for stage in range(3):
        drive = bed.drive("a")
        drive.step("a")
        before, room = drive.look("a"), drive.capacity(MOST)
        step, ctx = drive.fork("a")
        if stage:
            drive.begin(step, ctx)
        if stage == 2:
            drive.compute(ctx)
        drive.runner.unadmit(step, ctx)
        require_same(drive.look("a"), before, f"{where}: a step given up left a fork")
        require(drive.capacity(MOST) == room, f"{where}: a step given up left less room")
    drive = bed.drive("a")
    drive.step("a")
    before = drive.look("a")
    drive.run(*drive.fork("a"))
    forked = drive.look("a")
    require(forked != before, "case: a committed fork must be seen by read")
    drive.close("a")
    drive.require_rest("after a request with a fork was removed")
    drive.open("a")
    drive.step("a")
    drive.run(*drive.fork("a"))
    require_same(drive.look("a"), forked, "forks: a second request's fork differs")


def _check_release(bed: ResourceBed) -> None:
    case = bed.case
    drive = bed.drive("a")
    drive.step("a")
    drive.close("a")
    room = drive.capacity(MOST)
    for resource in drive.resources.values():
        resource.release(frozenset({"a tag of nobody"}))
    drive.open("a")
    drive.step("a")
    drive.close("a")
    for _ in range(2):
        for resource in drive.resources.values():
            resource.release(case.tags)
    drive.open("a")
    ctx = drive.context("a")
    reason = drive.refused(drive.declared("a"), ctx)
    require(reason is not None, "release: a step was admitted without its memory")
    require(not ctx.reservations, "release: a refused admit left a reservation")
    drive.close("a")
    for _ in range(2):
        for resource in drive.resources.values():
            resource.restore(case.tags)
    drive.require_rest("after its memory was released and restored")
    require(drive.capacity(MOST) == room, "restore: there is less room than before")
    drive.open("a")
    drive.step("a")
    require_same(drive.look("a"), bed.expected("a", 1), "restore: a step differs after it")


_RULES = (
    _check_steps,
    _check_ingest,
    _check_remove,
    _check_unadmit,
    _check_admitted_twice,
    _check_commit,
    _check_removal_in_flight,
    _check_return_in_flight,
    _check_exhaustion,
)
