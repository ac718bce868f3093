"""The log of events: numbered, bounded, and waited for."""

from __future__ import annotations

import asyncio
import re

import pytest

from phalanx.errors import PhalanxError
from phalanx.roles.events import EventKind, EventLog
from phalanx.testing.clock import ManualClock
from phalanx.testing.role_faults import Fault
from phalanx.testing.virtual_time import run_virtual
from tests.roles.manager.case import EngineGroupSpec, EngineKind, case, model, run


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


def test_events_say_what_an_operator_asked_for_and_no_alarm_at_what_was_planned():
    async def scenario():
        c = case(model(replicas=2, elastic_enabled=True))
        await c.manager.start()
        await c.manager.deactivate()
        await c.manager.activate(["weights"])
        await c.manager.activate()
        await c.manager.unblock("m/0")
        await c.manager.unblock("m/0", [])
        await c.manager.scale("m", 1)
        events = c.events.after(0)
        asked = [event.detail for event in events if event.kind is EventKind.OPERATION]
        assert asked[1:3] == ["sleep", "wake weights"]
        assert asked[3] == "wake cuda_graph kv_cache weights"
        assert asked[4:] == ["unblock m/0", "unblock m/0 none", "scale m 1"]
        states = [event.detail for event in events if event.kind is EventKind.STATE]
        assert states[-2:] == ["draining", "it was removed"]
        await c.manager.shutdown()

    run(scenario)


def test_an_external_engine_that_is_not_there_is_named_with_what_to_do():
    async def scenario():
        url = "http://127.0.0.1:1"
        group = EngineGroupSpec(num_replicas=1, engine=EngineKind.EXTERNAL, urls=(url,))
        c = case(model(engine_groups=(group,)), startup_timeout_s=3.0)
        c.world.faults.always("healthy", Fault.REFUSED)
        with pytest.raises(PhalanxError) as caught:
            await c.manager.start()
        assert "startup_timeout_s=3)" in str(caught.value)
        assert "(at http://" in str(caught.value)
        assert str(caught.value).endswith("; start the engine there, or change its url in urls")
        told = [event.detail for event in c.events.after(0) if event.kind is EventKind.WAITING]
        assert len(told) == 1
        assert re.fullmatch(r"until somebody serves at http://\S+, for at most 3 s", told[0])
        await c.manager.shutdown()

    run(scenario)


def test_a_start_that_is_interrupted_says_so():
    async def scenario():
        c = case(model())
        c.world.faults.always("healthy", Fault.HANG)
        starting = asyncio.create_task(c.manager.start())
        while not c.world.faults.asked["healthy"]:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.01)
        await c.manager.shutdown()
        await asyncio.gather(starting, return_exceptions=True)
        told = [event.detail for event in c.events.after(0)]
        assert "dead: it did not start: it was interrupted" in told

    run(scenario)
