"""Has an engine come to rest: its requests end, or are aborted, and none runs any more.

An engine that is paused computes nothing, whatever arrives; only one that is paused and idle is
asked for its memory.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from phalanx.roles.calls import CALL_TIMEOUT_S, MAX_GONE, Deadline, PollPause, attempt, insist
from phalanx.roles.contracts import EngineCallError, Tag
from phalanx.roles.replica import Replica

SETTLE_S = 0.2
"""What was sent before its sender heard of a drain arrives in this time, and is served."""
TURN_SETTLE_S = 0.02
"""The same where roles take turns: whoever sends requests has said by then that he has his answers."""


async def run_dry(
    replica: Replica, timeout_s: float, quiet_timeout_s: float, settle_s: float = SETTLE_S
) -> None:
    """Wait until nothing runs; what still does after `timeout_s` is aborted.

    Raises `EngineCallError` where it cannot be made sure in `quiet_timeout_s` more, or nobody listens
    there.
    """
    deadline = Deadline(timeout_s)
    if timeout_s > 0:
        await asyncio.sleep(settle_s)
    poll, num_gone = PollPause(), 0
    what = f"{replica.engine_id}: is it idle"
    while not deadline.passed:
        try:
            if await attempt(replica.engine.is_idle, what, CALL_TIMEOUT_S):
                replica.drained = True
                return
            num_gone = 0
            await _tell(replica)
        except EngineCallError as error:
            # A passing fault, unless nobody listens any more; it is asked again until the deadline.
            num_gone = num_gone + 1 if error.gone else 0
            if num_gone == MAX_GONE:
                raise
        await poll.rest()
    await quiet(replica, Deadline(quiet_timeout_s))


async def _tell(replica: Replica) -> None:
    """How many requests are waited for, where the engine says so."""
    what = f"{replica.engine_id}: how many requests run"
    with suppress(EngineCallError):
        count = await attempt(replica.engine.num_requests, what, CALL_TIMEOUT_S)
        replica.wait_for_requests(count or 0)


async def quiet(replica: Replica, deadline: Deadline) -> None:
    """Pause, then abort until it is idle: from now on nothing runs before `go_on`."""
    engine, name = replica.engine, replica.engine_id
    await _pause(replica, deadline)
    if Tag.KV_CACHE not in replica.residency.held:
        # Nothing can run, and an engine without its cache cannot be asked whether it is idle.
        return
    poll = PollPause()
    while not await insist(engine.is_idle, f"{name}: is it idle", deadline):
        if deadline.passed:
            raise EngineCallError(
                f"{name} still has requests after it was paused and they were aborted",
                uncertain=False,
            )
        await insist(engine.abort_all, f"{name}: abort its requests", deadline)
        await poll.rest()
    replica.drained = True


async def _pause(replica: Replica, deadline: Deadline) -> None:
    """Have it compute nothing any more; what it was computing is aborted."""
    replica.runs = None
    await insist(replica.engine.pause, f"{replica.engine_id}: pause", deadline)
    replica.runs = False


async def go_on(replica: Replica, deadline: Deadline) -> None:
    """Have it compute again."""
    if replica.runs is not True:
        replica.runs = None
        replica.drained = False
        await insist(replica.engine.go_on, f"{replica.engine_id}: continue", deadline)
        replica.runs = True
