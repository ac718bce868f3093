"""The log of events: numbered, bounded, and waited for."""

from __future__ import annotations

import asyncio

from phalanx.roles.events import EventKind, EventLog
from phalanx.testing.clock import ManualClock
from phalanx.testing.virtual_time import run_virtual
from tests.roles.manager.case import case, run


def test_the_newest_are_kept_with_numbers_that_grow():
    async def scenario():
        clock = ManualClock(5.0)
        log = EventLog(clock, capacity=3)
        for number in range(5):
            log.add("r", EventKind.OPERATION, detail=str(number))
        assert [event.number for event in log.after(0)] == [3, 4, 5]
        assert [event.detail for event in log.after(4)] == ["4"]
        assert log.after(5) == ()
        assert (log.last_number, log.after(0)[0].wall_s) == (5, 5.0)

    run_virtual(scenario())


def test_waiting_ends_with_the_next_event_for_everybody_or_with_its_time():
    async def scenario():
        log = EventLog(ManualClock())
        assert await log.wait(0, 10.0) == ()
        waiting = [asyncio.create_task(log.wait(0, 60.0)) for _ in range(3)]
        await asyncio.sleep(1.0)
        log.add("r", EventKind.STATE, engine_id="m/0", detail="ready")
        found = await asyncio.gather(*waiting)
        assert [len(events) for events in found] == [1, 1, 1]
        assert await log.wait(0, 60.0) == found[0]

    run_virtual(scenario())


def test_a_manager_tells_what_it_does_and_to_whom():
    async def scenario():
        c = case()
        await c.manager.start()
        await c.manager.deactivate()
        await c.manager.shutdown()
        told = [(event.kind.value, event.engine_id, event.detail) for event in c.events.after(0)]
        assert told[:4] == [
            ("operation", "", "start"),
            ("generation", "m/0", "1"),
            ("state", "m/0", "ready"),
            ("published", "", "1"),
        ]
        assert ("state", "m/0", "sleeping") in told

    run(scenario)
