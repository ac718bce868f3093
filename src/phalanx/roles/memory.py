"""Gives an engine's memory back and takes it again, and is never wrong about what it holds.

Engines crash on a repeated release and on an unmatched resume, so that only what is held is released
and only what is not is resumed; where an answer was lost, only an engine that says what it holds is
asked again, and any other's memory is unknown from then on.
"""

from __future__ import annotations

import asyncio

from phalanx.roles.calls import RETRY_S, Deadline, PollPause, attempt, insist
from phalanx.roles.contracts import ALL_TAGS, EngineCallError, Tag
from phalanx.roles.quiescence import quiet
from phalanx.roles.replica import Replica
from phalanx.roles.residency import Residency

NUM_TRIES = 3
"""A call whose answer never comes leaves time for so many."""


async def release(replica: Replica, tags: frozenset[Tag], timeout_s: float) -> None:
    """Have it give these tags back, of those that it holds; it is quiet.

    Raises `EngineCallError` where it did not: the residency then says what is known.
    """
    deadline = Deadline(timeout_s)
    while wanted := tags & replica.residency.held:
        try:
            done = await _change(replica, wanted, "release", deadline)
        finally:
            if replica.is_dynamic and Tag.WEIGHTS not in replica.residency.held:
                replica.lose_weights()
        if done:
            await _confirm(replica, wanted, deadline)
        elif tags & replica.residency.held:
            # It was refused: something runs after all.
            await asyncio.sleep(RETRY_S)
            await quiet(replica, deadline)
    await _overtake(replica, deadline)


async def resume(replica: Replica, tags: frozenset[Tag], timeout_s: float) -> None:
    """Have it take these tags again, of those that it has given back.

    Raises as `release` does.
    """
    deadline = Deadline(timeout_s)
    while wanted := tags - replica.residency.held:
        if not await _change(replica, wanted, "resume", deadline):
            await asyncio.sleep(RETRY_S)


async def _change(replica: Replica, tags: frozenset[Tag], verb: str, deadline: Deadline) -> bool:
    """Whether one call did it. The residency is exact before and after, and unknown in between."""
    engine, before = replica.engine, replica.residency
    call = engine.release if verb == "release" else engine.resume
    what = f"{replica.engine_id}: {verb} {', '.join(sorted(tags))}"
    replica.residency = before.asked(tags)
    try:
        await attempt(lambda: call(tags), what, max(deadline.left_s / NUM_TRIES, 1.0))
    except EngineCallError as error:
        replica.chased = replica.chased or (error.uncertain and verb == "resume")
        in_vain = error.gone or error.out_of_memory or error.taken_over
        is_last = in_vain or deadline.left_s <= RETRY_S
        if not error.uncertain:
            replica.residency = before
            if is_last:
                raise
            return False
        held = None if is_last else await _held(replica, deadline)
        if held is None:
            raise EngineCallError(
                f"{error}; nobody knows whether it was done", uncertain=True
            ) from error
        replica.residency = Residency(held)
        return False
    replica.chased = False
    known = before.without(tags) if verb == "release" else before.with_held(tags)
    replica.residency = known
    return True


async def _overtake(replica: Replica, deadline: Deadline) -> None:
    """A call that takes memory and was given up may be under way yet, and take it whenever it comes:
    an engine that says what it holds does none after a later one. Raises as `release` does.
    """
    free = ALL_TAGS - replica.residency.held
    if not (replica.chased and free and replica.residency.is_certain):
        return
    what = f"{replica.engine_id}: release {', '.join(sorted(free))} once more"
    before, replica.residency = replica.residency, replica.residency.asked(free)
    if await insist(replica.engine.resident, f"{replica.engine_id}: memory", deadline) is not None:
        await insist(lambda: replica.engine.release(free), what, deadline)
        await _confirm(replica, free, deadline)
    replica.residency, replica.chased = before, False


async def _confirm(replica: Replica, tags: frozenset[Tag], deadline: Deadline) -> None:
    """Wait until an engine that says what it holds no longer has them; others said it by answering.

    Raises `EngineCallError` where it does not get there.
    """
    what, poll = f"{replica.engine_id}: memory", PollPause()
    try:
        while (held := await insist(replica.engine.resident, what, deadline)) is not None:
            if not held & tags:
                return
            if deadline.passed:
                raise EngineCallError(
                    f"{what}: it has answered the release of {', '.join(sorted(tags))}, and still"
                    f" holds {', '.join(sorted(held & tags))}",
                    uncertain=True,
                )
            await poll.rest()
    except EngineCallError:
        replica.residency = replica.residency.asked(tags)
        raise


async def _held(replica: Replica, deadline: Deadline) -> frozenset[Tag] | None:
    """What it says that it holds; None where it cannot say, or not in time."""
    try:
        return await insist(replica.engine.resident, f"{replica.engine_id}: memory", deadline)
    except EngineCallError:
        return None
