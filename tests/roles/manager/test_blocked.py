"""Faults on the way to sleep and back: survived where that is safe, and told where it is not."""

from __future__ import annotations

import asyncio

import pytest

from phalanx.errors import RoleOperationFailedError, RoleOperationRefusedError
from phalanx.roles.contracts import ALL_TAGS
from phalanx.roles.manager import InferenceManager
from phalanx.routing.roles.snapshot import ReplicaState
from phalanx.testing.role_fakes import FakeRoleWorld
from phalanx.testing.role_faults import Fault
from tests.roles.manager.case import EngineGroupSpec, EngineKind, case, model, run

OPEN = [Fault.UNSENT, Fault.UNANSWERED, Fault.HANG, Fault.HANG_DONE]
SAFE = ["pause", "is_idle", "abort_all", "go_on", "ready", "resident"]


def sglang():
    """Engines as SGLang's, which say nothing of their memory and crash on what is done already."""
    return FakeRoleWorld(says=False, keeps_weights=True)


@pytest.mark.parametrize("fault", [*OPEN, Fault.REFUSED])
@pytest.mark.parametrize("point", SAFE)
def test_complaint_relax_282_a_a_passing_error_of_a_harmless_call_is_survived(point, fault):
    async def scenario():
        c = case(world=FakeRoleWorld(keeps_weights=True), health_interval_s=1000.0)
        await c.manager.start()
        c.engine().send(1000.0)
        c.engine().num_deaf = 3
        c.world.faults.next(point, [fault])
        await c.manager.deactivate()
        c.world.faults.next(point, [fault])
        await c.manager.activate()
        assert c.world.faults.asked[point] > 1
        assert c.state() is ReplicaState.READY
        assert len(c.world.engines) == 1
        assert not c.world.misused
        await c.manager.shutdown()

    run(scenario)


@pytest.mark.parametrize("fault", [*OPEN, Fault.REFUSED])
@pytest.mark.parametrize("point", ["release", "resume"])
def test_complaint_relax_282_a_a_passing_error_of_an_engine_that_says_what_it_holds_is_survived(
    point, fault
):
    async def scenario():
        c = case(model(replicas=2))
        await c.manager.start()
        c.world.faults.next(point, [fault])
        await c.manager.deactivate()
        await c.manager.activate()
        assert c.states_seen() == ["ready", "draining", "sleeping", "onloading", "ready"]
        assert len(c.world.engines) == 2
        assert not c.world.misused
        await c.manager.shutdown()

    run(scenario)


@pytest.mark.parametrize("fault", OPEN)
def test_complaint_relax_282_a_an_open_release_of_another_engine_blocks_and_kills_nothing(fault):
    async def scenario():
        c = case(model(replicas=2), world=sglang())
        await c.manager.start()
        c.world.faults.next("release", [fault])
        with pytest.raises(RoleOperationFailedError, match="could not be put to sleep"):
            await c.manager.deactivate()
        blocked = next(n for n in ("m/0", "m/1") if c.shown(n).blocked)
        assert c.state(blocked) is ReplicaState.DRAINING
        assert c.manager.residency()[blocked] is None
        assert len(c.world.running) == 2
        calls = list(c.engine(blocked).log)
        for operation in (c.manager.deactivate, c.manager.activate):
            with pytest.raises(RoleOperationRefusedError, match="blocked"):
                await operation()
        assert c.engine(blocked).log == calls
        with pytest.raises(RoleOperationFailedError, match="cannot say what it holds"):
            await c.manager.unblock(blocked)
        await c.manager.recover(blocked)
        assert c.state(blocked) is ReplicaState.READY
        assert len(c.world.running) == 2
        assert not c.world.misused
        await c.manager.shutdown()

    run(scenario)


@pytest.mark.parametrize("fault", OPEN)
def test_d9_an_operator_can_say_what_a_blocked_engine_holds(fault):
    async def scenario():
        c = case(world=sglang())
        await c.manager.start()
        c.world.faults.next("release", [fault])
        with pytest.raises(RoleOperationFailedError):
            await c.manager.deactivate()
        await c.manager.unblock("m/0", holds=sorted(c.engine().held))
        assert c.state() is ReplicaState.SLEEPING
        assert c.manager.residency() == {"m/0": frozenset()}
        await c.manager.unblock("m/0")
        await c.manager.activate()
        assert c.state() is ReplicaState.READY
        assert not c.world.misused
        await c.manager.shutdown()

    run(scenario)


def test_d9_a_release_that_is_never_answered_is_told_as_blocked_when_its_time_is_over():
    async def scenario():
        c = case(offload_timeout_s=20.0)
        await c.manager.start()
        c.world.faults.always("release", Fault.HANG)
        before_s = asyncio.get_running_loop().time()
        with pytest.raises(RoleOperationFailedError, match="release.*no answer"):
            await c.manager.deactivate()
        assert asyncio.get_running_loop().time() - before_s < 60.0
        assert c.shown().blocked and not c.shown().direct_eligible
        assert c.manager.residency() == {"m/0": None}
        c.world.faults.stop()
        await c.manager.unblock("m/0")
        assert c.state() is ReplicaState.SLEEPING
        assert c.manager.residency() == {"m/0": frozenset()}
        await c.manager.shutdown()

    run(scenario)


def test_d9_an_engine_that_answers_a_release_and_keeps_its_memory_is_blocked():
    async def scenario():
        c = case()
        await c.manager.start()
        c.engine().release = lambda tags: asyncio.sleep(0.1)
        with pytest.raises(RoleOperationFailedError, match="still.*holds"):
            await c.manager.deactivate()
        assert c.shown().blocked
        assert c.manager.residency() == {"m/0": None}
        await c.manager.shutdown()

    run(scenario)


def test_d7_a_resume_that_is_refused_is_rolled_back_to_sleeping():
    async def scenario():
        c = case(model(weight_source="local"), world=FakeRoleWorld(says=False))
        await c.manager.start()
        await c.manager.update_weights("m", "/v/1", "1")
        await c.manager.deactivate()
        c.world.faults.next("resume", [None, *[Fault.REFUSED] * 100])
        with pytest.raises(RoleOperationFailedError, match="given back"):
            await c.manager.activate()
        assert c.state() is ReplicaState.SLEEPING
        assert "refused" in c.shown().detail
        assert c.engine().held == frozenset()
        c.world.faults.stop()
        await c.manager.activate()
        assert c.state() is ReplicaState.READY
        assert not c.world.misused
        await c.manager.shutdown()

    run(scenario)


@pytest.mark.parametrize("point", ["load_weights", "go_on", "ready", "router.add"])
def test_d7_whatever_else_fails_in_a_wake_is_rolled_back_too(point):
    async def scenario():
        spec = model(weight_source="local", router=True)
        c = case(spec, world=FakeRoleWorld(says=False), health_interval_s=1000.0)
        await c.manager.start()
        await c.manager.deactivate()
        c.world.faults.always(point, Fault.REFUSED)
        with pytest.raises(RoleOperationFailedError, match="given back"):
            await c.manager.activate()
        assert c.state() is ReplicaState.SLEEPING
        assert c.engine().held == frozenset() and c.engine().paused
        assert c.world.routers["m"].workers == set()
        c.world.faults.stop()
        await c.manager.activate()
        assert c.state() is ReplicaState.READY
        assert not c.world.misused
        await c.manager.shutdown()

    run(scenario)


def test_d7_a_resume_that_stays_open_is_blocked_and_a_death_in_it_is_dead():
    async def scenario():
        c = case(model(replicas=2), world=sglang())
        await c.manager.start()
        await c.manager.deactivate()
        c.world.faults.next("resume", [Fault.UNANSWERED, Fault.CRASH])
        with pytest.raises(RoleOperationFailedError):
            await c.manager.activate()
        states = sorted(c.state(n).value for n in ("m/0", "m/1"))
        assert states == ["dead", "onloading"]
        blocked = next(n for n in ("m/0", "m/1") if c.shown(n).blocked)
        assert c.state(blocked) is ReplicaState.ONLOADING
        await c.manager.shutdown()

    run(scenario)


def test_complaint_relax_282_b_leftover_work_never_runs_after_a_release():
    async def scenario():
        c = case(drain_timeout_s=5.0, world=sglang())
        await c.manager.start()
        engine = c.engine()
        running = [engine.send(1000.0) for _ in range(3)]
        pause, paused = engine.pause, asyncio.Event()

        async def pause_and_say():
            await pause()
            paused.set()

        engine.pause = pause_and_say
        sleep = asyncio.create_task(c.manager.deactivate())
        await paused.wait()
        late = [engine.send(5.0) for _ in range(3)]
        await sleep
        assert [request.ended for request in running] == ["aborted"] * 3
        assert engine.is_up and not engine.misused
        assert not any(request.started for request in late)
        asleep = engine.send(5.0)
        await asyncio.sleep(1000.0)
        assert not asleep.started
        await c.manager.activate()
        await asyncio.sleep(10.0)
        assert asleep.ended == "finished"
        assert engine.is_up
        await c.manager.shutdown()

    run(scenario)


def test_complaint_slime_2015_a_request_that_slips_in_before_the_release_is_waited_for():
    async def scenario():
        c = case(world=sglang())
        await c.manager.start()
        engine = c.engine()
        is_idle, slipped = engine.is_idle, []

        async def idle_and_then_not():
            answer = await is_idle()
            if answer and len(slipped) < 3:
                slipped.append(engine.send(0.5))
            return answer

        engine.is_idle = idle_and_then_not
        await c.manager.deactivate()
        assert len(slipped) >= 2
        assert slipped[0].ended == "aborted"
        assert engine.is_up and engine.held == frozenset()
        assert c.state() is ReplicaState.SLEEPING
        await c.manager.shutdown()

    run(scenario)


def test_one_whose_requests_do_not_end_even_aborted_is_blocked_not_released():
    async def scenario():
        c = case(drain_timeout_s=1.0)
        await c.manager.start()
        c.engine().is_idle = lambda: asyncio.sleep(0.1, result=False)
        with pytest.raises(RoleOperationFailedError, match="still has requests"):
            await c.manager.deactivate()
        assert c.shown().blocked
        assert c.manager.residency() == {"m/0": ALL_TAGS}
        assert not [line for line in c.engine().log if line.startswith("release")]
        await c.manager.shutdown()

    run(scenario)


def test_one_that_cannot_be_taken_out_of_its_router_is_blocked_not_released():
    async def scenario():
        c = case(model(router=True))
        await c.manager.start()
        c.world.faults.always("router.remove", Fault.UNSENT)
        with pytest.raises(RoleOperationFailedError, match="remove it from the router"):
            await c.manager.deactivate()
        assert c.shown().blocked
        assert "pause" not in c.engine().log
        c.world.faults.stop()
        await c.manager.unblock("m/0")
        assert c.state() is ReplicaState.SLEEPING
        assert c.world.routers["m"].workers == set()
        await c.manager.shutdown()

    run(scenario)


@pytest.mark.parametrize("operation", [InferenceManager.drain, InferenceManager.deactivate])
def test_what_runs_again_since_somebody_else_took_the_memory_back_is_waited_for(operation):
    async def scenario():
        c = case()
        await c.manager.start()
        engine = c.engine()
        await engine.pause()
        held_over = engine.send(8.0)
        await engine.release(frozenset({"kv_cache"}))
        await asyncio.sleep(6.0)
        assert c.state() is ReplicaState.DRAINING
        await engine.resume(frozenset({"kv_cache"}))
        await engine.go_on()
        await operation(c.manager)
        assert held_over.ended == "finished"
        assert not engine.misused
        await c.manager.deactivate()
        assert engine.held == frozenset()
        await c.manager.shutdown()

    run(scenario)


def test_memory_that_somebody_else_releases_takes_the_replica_out_and_the_next_wake_brings_it_back():
    async def scenario():
        c = case()
        await c.manager.start()
        await c.engine().pause()
        await c.engine().release(frozenset({"kv_cache"}))
        await asyncio.sleep(6.0)
        assert c.state() is ReplicaState.DRAINING
        assert "somebody else" in c.shown().detail
        await c.manager.activate()
        assert c.state() is ReplicaState.READY
        await c.manager.shutdown()

    run(scenario)


def test_an_engine_that_somebody_else_has_taken_over_is_asked_once_and_recovered():
    """Whoever asked it first would wait for its deadline, and be told no more than that it is over."""

    async def scenario():
        c = case(
            model("m", engine_groups=(EngineGroupSpec(engine=EngineKind.EXTERNAL, urls=(URL,)),))
        )
        await c.manager.start()
        c.world.faults.always("release", Fault.TAKEN_OVER)
        with pytest.raises(RoleOperationFailedError, match="400 not yours"):
            await c.manager.deactivate()
        assert c.world.faults.asked["release"] == 1
        assert c.shown("m/0").blocked and "400 not yours" in c.shown("m/0").detail
        c.world.faults.always("release", None)  # as to the client of a new generation
        await c.manager.recover("m/0")
        await c.manager.activate()
        await c.manager.deactivate()
        assert c.state("m/0") is ReplicaState.SLEEPING
        await c.manager.shutdown()

    run(scenario)


URL = "http://127.0.0.1:1"


def test_d9_what_is_written_off_is_stopped_before_another_one_starts_and_at_the_end():
    async def scenario():
        c = case(world=sglang())
        await c.manager.start()
        await c.manager.deactivate()
        c.world.faults.always("stop", Fault.REFUSED)
        with pytest.raises(RoleOperationFailedError, match="could not be stopped"):
            await c.manager.recover("m/0")
        assert c.manager.residency() == {"m/0": None}
        await c.manager.unblock("m/0", holds=[])
        assert c.manager.residency() == {}
        await c.manager.deactivate()
        with pytest.raises(RoleOperationFailedError, match="could not be stopped"):
            await c.manager.activate()
        assert [engine.launch.generation for engine in c.world.running] == [1]
        c.world.faults.stop()
        await asyncio.sleep(100.0)
        await c.manager.activate()
        assert [engine.launch.generation for engine in c.world.running] == [2]

        await c.manager.deactivate()
        c.world.faults.always("stop", Fault.REFUSED)
        with pytest.raises(RoleOperationFailedError, match="could not be stopped"):
            await c.manager.recover("m/0")
        await c.manager.unblock("m/0", holds=[])
        c.world.faults.stop()
        await c.manager.shutdown()
        assert not c.world.running

    run(scenario)
