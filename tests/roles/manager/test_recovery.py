"""The dead are stopped for certain and followed by a new generation, where that is wanted."""

from __future__ import annotations

import asyncio

import pytest

from phalanx.errors import PhalanxError, RoleOperationFailedError, RoleOperationRefusedError
from phalanx.roles.events import EventKind
from phalanx.routing.roles.snapshot import ReplicaState
from phalanx.testing.role_faults import Fault
from tests.roles.manager.case import EngineGroupSpec, EngineKind, case, model, run


def lasting(**fields):
    return model(fault_tolerance_enabled=True, **fields)


def test_i79_d6_recovery_is_a_new_generation_that_begins_at_starting():
    async def scenario():
        c = case(lasting())
        await c.manager.start()
        first = c.shown()
        c.engine().crash()
        await c.until(lambda: c.state() is ReplicaState.DEAD)
        assert c.shown().detail == "it crashed"
        await c.until(lambda: c.state() is ReplicaState.READY)
        assert (c.shown().engine_id, c.shown().generation) == (first.engine_id, 2)
        assert c.shown().server_id != first.server_id
        kinds = [(e.kind, e.detail) for e in c.events.after(0) if e.engine_id == "m/0"]
        assert (EventKind.STATE, "dead: it crashed") in kinds
        assert (EventKind.GENERATION, "2") in kinds
        await c.manager.shutdown()

    run(scenario)


def test_without_fault_tolerance_the_dead_stay_dead_and_it_is_told():
    async def scenario():
        c = case(model(replicas=2))
        await c.manager.start()
        c.engine("m/0").crash()
        await asyncio.sleep(300.0)
        assert c.state("m/0") is ReplicaState.DEAD
        assert c.model_state() is ReplicaState.READY
        assert len(c.world.engines) == 2
        await c.manager.activate()
        c.engine("m/1").crash()
        await asyncio.sleep(300.0)
        assert c.model_state() is ReplicaState.DEAD
        with pytest.raises(RoleOperationFailedError, match="m/0 is dead.*recover"):
            await c.manager.activate()
        await c.manager.recover("m/0")
        assert (c.state("m/0"), c.shown("m/0").generation) == (ReplicaState.READY, 2)
        await c.manager.shutdown()

    run(scenario)


def test_a_recovery_that_fails_is_tried_again_ever_more_slowly():
    async def scenario():
        c = case(lasting())
        await c.manager.start()
        c.world.faults.next("launch", [Fault.REFUSED] * 4)
        before_s = asyncio.get_running_loop().time()
        c.engine().crash()
        await c.until(lambda: c.state() is ReplicaState.DEAD)
        revision = c.revision
        await c.until(lambda: c.state() is ReplicaState.READY)
        assert c.revision == revision + 1
        assert 15.0 < asyncio.get_running_loop().time() - before_s < 20.0
        assert c.shown().generation == 6
        await c.manager.shutdown()

    run(scenario)


def test_complaint_miles_1724_a_recovered_engine_serves_with_the_current_weights_only():
    async def scenario():
        c = case(lasting(replicas=2, weight_source="local", router=True))
        await c.manager.start()
        await c.manager.update_weights("m", "/v/7", "7")
        c.engine("m/0").crash()
        await c.until(lambda: c.state("m/0") is ReplicaState.DEAD)
        router = c.world.routers["m"]
        seen = []

        def watch(point, act, **more):
            if point == "router.add":
                seen.append(c.engine("m/0").version)
            return strike(point, act, **more)

        strike, c.world.faults.strike = c.world.faults.strike, watch
        await c.until(lambda: c.state("m/0") is ReplicaState.READY)
        assert seen == ["7"]
        assert c.engine("m/0").url in router.workers
        assert c.shown("m/0").weight_version == "7"
        await c.manager.shutdown()

    run(scenario)


def test_complaint_miles_1724_weights_that_change_while_it_comes_up_are_those_it_gets():
    async def scenario():
        c = case(lasting(replicas=2, weight_source="local"))
        await c.manager.start()
        c.engine("m/0").crash()
        await c.until(lambda: c.state("m/0") is ReplicaState.DEAD)
        await asyncio.sleep(1.0)
        assert len(c.world.engines) == 3
        await c.manager.update_weights("m", "/v/8", "8")
        await c.until(lambda: c.state("m/0") is ReplicaState.READY)
        assert c.engine("m/0").loads == ["8"]
        await c.manager.shutdown()

    run(scenario)


def test_nothing_is_started_while_the_role_sleeps_and_the_dead_come_back_with_its_wake():
    async def scenario():
        c = case(lasting(replicas=2))
        await c.manager.start()
        await c.manager.deactivate()
        c.engine("m/0").crash()
        await asyncio.sleep(300.0)
        assert c.state("m/0") is ReplicaState.DEAD
        assert len(c.world.engines) == 2
        await c.manager.activate()
        assert [c.state(f"m/{n}") for n in (0, 1)] == [ReplicaState.READY] * 2
        await c.manager.shutdown()

    run(scenario)


def test_a_recovery_that_is_under_way_ends_with_a_deactivate():
    async def scenario():
        c = case(lasting(replicas=2))
        await c.manager.start()
        c.engine("m/0").crash()
        await c.until(lambda: c.state("m/0") is ReplicaState.DEAD)
        await asyncio.sleep(1.0)
        assert c.engine("m/0").is_up
        await c.manager.deactivate()
        assert not c.engine("m/0").is_up
        assert c.manager.residency() == {"m/1": frozenset()}
        await asyncio.sleep(100.0)
        assert not c.engine("m/0").is_up
        await c.manager.shutdown()

    run(scenario)


def test_no_generation_is_started_before_nothing_is_left_of_the_last():
    async def scenario():
        c = case(lasting())
        await c.manager.start()
        c.world.faults.always("stop", Fault.HANG)
        c.world.faults.always("healthy", Fault.HANG)
        await c.until(lambda: c.shown().blocked)
        assert c.state() is ReplicaState.DEAD
        assert c.engine().is_up and len(c.world.engines) == 1
        assert c.manager.residency() == {"m/0": None}
        await asyncio.sleep(1000.0)
        assert len(c.world.engines) == 1
        c.world.faults.stop()
        await c.until(lambda: c.state() is ReplicaState.READY)
        assert not c.engine("m/0", 1).is_up
        await c.manager.shutdown()

    run(scenario)


def test_one_that_hangs_is_dead_after_so_many_health_checks():
    async def scenario():
        c = case(lasting(), health_interval_s=5.0, health_timeout_s=1.0, max_health_failures=3)
        await c.manager.start()
        c.world.faults.next("healthy", [Fault.HANG, Fault.REFUSED, None, *[Fault.HANG] * 3])
        before = c.world.faults.asked["healthy"]
        await c.until(lambda: c.state() is ReplicaState.DEAD)
        assert c.world.faults.asked["healthy"] - before == 6
        assert c.shown().detail == "it failed 3 health checks in a row"
        await c.until(lambda: c.state() is ReplicaState.READY)
        assert not c.engine("m/0", 1).is_up
        await c.manager.shutdown()

    run(scenario)


def test_one_that_is_only_slow_to_answer_is_not_killed():
    async def scenario():
        c = case(lasting())
        await c.manager.start()
        c.world.faults.always("healthy", Fault.SLOW)
        c.engine().send(500.0)
        await asyncio.sleep(300.0)
        assert c.world.faults.asked["healthy"] > 20
        assert (c.state(), c.shown().generation) == (ReplicaState.READY, 1)
        await c.manager.shutdown()

    run(scenario)


def test_recover_is_refused_for_one_that_serves_and_waits_for_the_wake_of_one_that_sleeps():
    async def scenario():
        c = case(model(replicas=2))
        await c.manager.start()
        with pytest.raises(RoleOperationRefusedError, match="m/0 serves"):
            await c.manager.recover("m/0")
        await c.manager.deactivate()
        await c.manager.recover("m/0")
        assert c.state("m/0") is ReplicaState.DEAD
        assert c.manager.residency() == {"m/1": frozenset()}
        await c.manager.activate()
        assert (c.state("m/0"), c.shown("m/0").generation) == (ReplicaState.READY, 2)
        for unknown in ("m/2", "other/0", "m"):
            with pytest.raises(PhalanxError, match="has no replica"):
                await c.manager.recover(unknown)
        await c.manager.shutdown()

    run(scenario)


@pytest.mark.parametrize("operation", ["drain", "deactivate", "shutdown"])
def test_one_that_nobody_listens_at_any_more_is_not_waited_for(operation):
    """As where a hurried end of the job kills the processes while their manager drains."""

    async def scenario():
        c = case(model(replicas=2), drain_timeout_s=500.0, health_interval_s=1000.0)
        await c.manager.start()
        for engine_id in ("m/0", "m/1"):
            c.engine(engine_id).end()
        loop = asyncio.get_running_loop()
        before_s = loop.time()
        await getattr(c.manager, operation)()
        assert loop.time() - before_s < 10.0
        await c.manager.shutdown()

    run(scenario)


def test_a_death_during_a_deactivate_is_no_failure_of_it():
    async def scenario():
        c = case(model(replicas=2))
        await c.manager.start()
        c.world.faults.next("release", [Fault.CRASH])
        await c.manager.deactivate()
        assert sorted([c.state("m/0"), c.state("m/1")]) == ["dead", "sleeping"]
        assert list(c.manager.residency().values()) == [frozenset()]
        await c.manager.shutdown()

    run(scenario)


def test_an_external_engine_that_comes_back_is_used_again():
    external = EngineGroupSpec(1, engine=EngineKind.EXTERNAL, urls=("http://a:1",))

    async def scenario():
        c = case(lasting(engine_groups=(external,)), health_timeout_s=1.0)
        await c.manager.start()
        c.world.faults.always("healthy", Fault.REFUSED)
        await c.until(lambda: c.state() is ReplicaState.DEAD)
        await asyncio.sleep(200.0)
        c.world.faults.stop()
        await c.until(lambda: c.state() is ReplicaState.READY)
        assert len({engine.url for engine in c.world.running}) == 1
        assert c.shown().generation > 1
        await c.manager.shutdown()
        await c.world.close()

    run(scenario)


def test_an_external_engine_that_was_started_anew_gets_its_weights_again():
    """It has not missed a health check; only its version tells."""
    external = EngineGroupSpec(1, engine=EngineKind.EXTERNAL, urls=("http://a:1",))

    async def scenario():
        c = case(lasting(engine_groups=(external,), weight_source="local"), health_interval_s=5.0)
        await c.manager.start()
        await c.manager.update_weights("m", "/v/7", "7")
        await asyncio.sleep(20.0)
        c.engine().version = "default"
        await c.until(lambda: c.state() is ReplicaState.DEAD)
        assert "'default' instead of '7'" in c.shown().detail
        await c.until(lambda: c.state() is ReplicaState.READY)
        assert (c.engine().loads, c.engine().version) == (["7", "7"], "7")
        await c.manager.shutdown()
        await c.world.close()

    run(scenario)


def test_a_recovery_does_not_publish_what_a_drain_has_forbidden_meanwhile():
    async def scenario():
        c = case(lasting(replicas=2))
        await c.manager.start()
        c.engine("m/0").crash()
        await c.until(lambda: c.state("m/0") is ReplicaState.DEAD)
        await asyncio.sleep(1.0)
        assert c.engine("m/0").is_up
        await c.manager.drain()
        await asyncio.sleep(100.0)
        assert c.state("m/0") is ReplicaState.DEAD
        assert not c.engine("m/0").is_up
        await c.manager.activate()
        assert [c.state(f"m/{n}") for n in (0, 1)] == [ReplicaState.READY] * 2
        await c.manager.shutdown()

    run(scenario)


def test_one_that_dies_while_it_is_scaled_away_is_not_started_again():
    async def scenario():
        c = case(lasting(replicas=2, elastic_enabled=True))
        await c.manager.start()
        c.engine("m/1").send(10.0)
        scale = asyncio.create_task(c.manager.scale("m", 1))
        await c.until(lambda: c.state("m/1") is ReplicaState.DRAINING)
        c.engine("m/1").crash()
        await scale
        assert c.state("m/1") is None
        await asyncio.sleep(100.0)
        assert len(c.world.engines) == 2
        await c.manager.shutdown()

    run(scenario)


def test_what_is_left_of_a_candidate_is_gone_before_the_next_is_started():
    async def scenario():
        c = case(model(elastic_enabled=True), health_interval_s=1000.0)
        await c.manager.start()
        c.world.faults.always("stop", Fault.HANG)
        c.world.faults.always("ready", Fault.REFUSED)
        with pytest.raises(PhalanxError):
            await c.manager.scale("m", 2)
        assert c.state("m/1") is None
        assert c.manager.residency()["m/1"] is None
        c.world.faults.always("ready", None)
        with pytest.raises(PhalanxError, match="m/1: its processes could not be stopped"):
            await c.manager.scale("m", 2)
        assert len(c.world.engines) == 2
        c.world.faults.stop()
        await c.manager.scale("m", 2)
        assert not c.engine("m/1", 1).is_up
        assert c.state("m/1") is ReplicaState.READY
        await c.manager.shutdown()

    run(scenario)


def test_the_dead_leave_their_router_even_where_that_fails_at_first():
    async def scenario():
        c = case(model(replicas=2, router=True))
        await c.manager.start()
        workers = c.world.routers["m"].workers
        c.world.faults.always("router.remove", Fault.REFUSED)
        c.engine("m/0").crash()
        await c.until(lambda: c.shown("m/0").blocked)
        assert "router" in c.shown("m/0").detail and len(workers) == 2
        assert c.manager.residency()["m/1"] and "m/0" not in c.manager.residency()
        c.world.faults.stop()
        await c.until(lambda: not c.shown("m/0").blocked)
        assert workers == {c.engine("m/1").url}
        await c.manager.shutdown()

    run(scenario)


def test_an_external_engine_where_nobody_listens_any_more_is_dead_not_blocked():
    external = EngineGroupSpec(1, engine=EngineKind.EXTERNAL, urls=("http://a:1",))

    async def scenario():
        c = case(model(engine_groups=(external,)), health_interval_s=1000.0)
        await c.manager.start()
        c.engine().crash()
        await asyncio.sleep(1.0)
        assert c.state() is ReplicaState.READY
        await c.manager.deactivate()
        assert c.state() is ReplicaState.DEAD
        assert not c.shown().blocked
        await c.manager.shutdown()

    run(scenario)
