"""Which weights replicas hold, when they get them, and what is refused."""

from __future__ import annotations

import asyncio

import pytest

from phalanx.errors import (
    ConfigurationError,
    RoleOperationFailedError,
    RoleOperationRefusedError,
    UnknownModelError,
)
from phalanx.routing.roles.snapshot import ReplicaState
from phalanx.schema.roles import WeightSource
from phalanx.testing.role_fakes import FakeRoleWorld
from phalanx.testing.role_faults import Fault
from tests.roles.manager.case import case, model, run

DYNAMIC = [source.value for source in WeightSource if source is not WeightSource.STATIC]


def trained(source="local", **fields):
    return model(weight_source=source, **fields)


def world():
    return FakeRoleWorld(says=False)


def test_i96_a_static_model_refuses_every_update():
    async def scenario():
        c = case()
        await c.manager.start()
        for update in (
            c.manager.update_weights("m", "/v/1", "1"),
            c.manager.confirm_weights("m", "1"),
            c.manager.broadcast("m", "/v/1", 1),
        ):
            with pytest.raises(ConfigurationError, match="'static'"):
                await update
        assert not c.engine().loads
        with pytest.raises(UnknownModelError):
            await c.manager.update_weights("other", "/v/1", "1")
        await c.manager.shutdown()

    run(scenario)


@pytest.mark.parametrize("source", ["static", "local", "actor"])
def test_i95_only_models_of_dcs_register_for_broadcasts(source):
    async def scenario():
        c = case(trained(source), trained("dcs", name="d"))
        with pytest.raises(ConfigurationError, match=f"weight_source='{source}'"):
            await c.manager.register_broadcast("m")
        with pytest.raises(ConfigurationError, match="only models with weight_source 'dcs'"):
            await c.manager.broadcast("m", "/v/1", 1)
        assert await c.manager.register_broadcast("d") is None
        assert await c.manager.register_broadcast("d") is None

    run(scenario)


def test_i95_a_broadcast_reaches_every_registered_replica_and_later_ones():
    async def scenario():
        c = case(trained("dcs", replicas=2, elastic_enabled=True, fault_tolerance_enabled=True))
        await c.manager.start()
        assert c.states_seen() == ["starting"]
        assert "waits" in c.shown().detail
        await c.manager.broadcast("m", "/v/3", 3)
        assert [c.shown(f"m/{n}").weight_version for n in (0, 1)] == ["3", "3"]
        assert c.model_state() is ReplicaState.READY
        await c.manager.scale("m", 3)
        assert c.engine("m/2").version == "3"
        c.engine("m/0").crash()
        await c.until(lambda: c.state("m/0") is ReplicaState.DEAD)
        await c.manager.broadcast("m", "/v/12", 12)
        await c.until(lambda: c.state("m/0") is ReplicaState.READY)
        assert {engine.version for engine in c.world.running} == {"12"}
        assert await c.manager.register_broadcast("m") == 12
        await c.manager.broadcast("m", "/v/12", 12)
        assert [engine.loads for engine in c.world.running] == [["3", "12"], ["3", "12"], ["12"]]
        with pytest.raises(RoleOperationRefusedError, match="3 from '/v/3' is not newer"):
            await c.manager.broadcast("m", "/v/3", 3)
        with pytest.raises(RoleOperationRefusedError, match="not newer"):
            await c.manager.broadcast("m", "/other/12", 12)
        with pytest.raises(ConfigurationError, match="whole number"):
            await c.manager.update_weights("m", "/v/13", "v13")
        await c.manager.shutdown()

    run(scenario)


def test_i89_a_static_model_skips_the_weight_step():
    async def scenario():
        c = case()
        await c.manager.start()
        await c.manager.deactivate()
        await c.manager.activate()
        assert c.world.faults.asked["load_weights"] == c.world.faults.asked["weight_version"] == 0
        assert c.shown().weight_version is None
        await c.manager.shutdown()

    run(scenario)


@pytest.mark.parametrize("source", DYNAMIC)
def test_i89_a_dynamic_model_is_never_ready_before_its_weights(source):
    async def scenario():
        c = case(trained(source), world=world(), health_interval_s=1000.0)
        await c.manager.start()
        if source != "local":
            await asyncio.sleep(100.0)
            assert c.state() is ReplicaState.STARTING
            if source == "dcs":
                await c.manager.broadcast("m", "/v/1", 1)
            else:
                c.engine().put_weights("1")
                await c.manager.confirm_weights("m", "1")
        assert c.state() is ReplicaState.READY
        assert c.shown().weight_version == c.engine().version
        await c.manager.deactivate()
        assert c.shown().weight_version is None
        wake = asyncio.create_task(c.manager.activate())
        await c.until(lambda: c.state() is not ReplicaState.SLEEPING)
        await wake
        if source == "actor":
            assert c.state() is ReplicaState.ONLOADING
            c.engine().put_weights("2")
            await c.manager.confirm_weights("m", "2")
        assert c.state() is ReplicaState.READY
        assert not c.engine().lost_weights
        assert not c.world.misused
        await c.manager.shutdown()

    run(scenario)


def test_weights_go_in_before_the_cache_takes_its_memory():
    async def scenario():
        c = case(trained(), world=world())
        await c.manager.start()
        await c.manager.update_weights("m", "/v/5", "5")
        await c.manager.deactivate()
        begin = len(c.engine().log)
        await c.manager.activate()
        assert c.engine().log[begin:] == [
            "resume weights",
            "load_weights 5 /v/5",
            "resume cuda_graph,kv_cache",
            "go_on",
            "ready",
        ]
        await c.manager.shutdown()

    run(scenario)


def test_an_engine_that_keeps_its_weights_need_not_load_them_again():
    async def scenario():
        c = case(trained())
        await c.manager.start()
        await c.manager.update_weights("m", "/v/5", "5")
        await c.manager.deactivate()
        await c.manager.activate()
        assert c.engine().loads == ["5"]
        await c.manager.shutdown()

    run(scenario)


def test_weights_of_a_sleeping_role_are_loaded_when_it_wakes():
    async def scenario():
        c = case(trained(), world=world())
        await c.manager.start()
        await c.manager.deactivate()
        await c.manager.update_weights("m", "/v/2", "2")
        await c.manager.update_weights("m", "/v/3", "3")
        assert c.engine().loads == []
        await c.manager.activate(["weights"])
        assert c.engine().loads == ["3"]
        await c.manager.update_weights("m", "/v/4", "4")
        await c.manager.activate()
        assert c.engine().loads == ["3", "4"]
        assert c.shown().weight_version == "4"
        await c.manager.shutdown()

    run(scenario)


def test_the_same_update_again_loads_nothing():
    async def scenario():
        c = case(trained(replicas=2))
        await c.manager.start()
        await asyncio.gather(*(c.manager.update_weights("m", "/v/1", "1") for _ in range(3)))
        await c.manager.update_weights("m", "/v/1", "1")
        assert c.engine("m/0").loads == c.engine("m/1").loads == ["1"]
        with pytest.raises(ConfigurationError, match="another version"):
            await c.manager.update_weights("m", "/w/1", "1")
        for bad in ("", "default"):
            with pytest.raises(ConfigurationError, match="default"):
                await c.manager.update_weights("m", "/v/1", bad)
        await c.manager.shutdown()

    run(scenario)


def test_an_update_that_all_who_live_refuse_is_not_what_the_dead_come_back_with():
    async def scenario():
        c = case(trained(replicas=2, fault_tolerance_enabled=True))
        await c.manager.start()
        c.world.faults.next("load_weights", [Fault.REFUSED, Fault.CRASH])
        with pytest.raises(RoleOperationFailedError, match="nothing has changed"):
            await c.manager.update_weights("m", "/nowhere", "1")
        await c.until(lambda: {c.state("m/0"), c.state("m/1")} == {ReplicaState.READY})
        assert c.registry.snapshot.content.models[0].weight_version == "default"
        assert {c.shown(f"m/{n}").weight_version for n in (0, 1)} == {"default"}
        assert all(
            "1" not in engine.loads for engine in c.world.running if engine.launch.generation > 1
        )
        await c.manager.shutdown()

    run(scenario)


def test_an_update_that_all_refuse_changes_nothing():
    async def scenario():
        c = case(trained(replicas=2))
        await c.manager.start()
        revision = c.revision
        c.world.faults.next("load_weights", [Fault.REFUSED] * 2)
        with pytest.raises(RoleOperationFailedError, match="nothing has changed"):
            await c.manager.update_weights("m", "/v/1", "1")
        assert c.revision == revision
        assert c.registry.snapshot.content.models[0].weight_version == "default"
        await c.manager.update_weights("m", "/v/1", "1")
        assert c.model_state() is ReplicaState.READY
        await c.manager.shutdown()

    run(scenario)


def test_one_that_does_not_get_the_weights_of_the_others_serves_no_more_until_it_does():
    async def scenario():
        c = case(trained(replicas=2))
        await c.manager.start()
        c.world.faults.next("load_weights", [Fault.REFUSED])
        with pytest.raises(RoleOperationFailedError, match="not on every replica"):
            await c.manager.update_weights("m", "/v/1", "1")
        states = {n: c.shown(f"m/{n}") for n in (0, 1)}
        blocked = next(shown for shown in states.values() if shown.blocked)
        assert blocked.state is ReplicaState.DRAINING
        assert sum(shown.direct_eligible for shown in states.values()) == 1
        await c.manager.unblock(blocked.engine_id)
        assert c.shown(blocked.engine_id).direct_eligible
        assert c.shown(blocked.engine_id).weight_version == "1"
        await c.manager.shutdown()

    run(scenario)


@pytest.mark.parametrize("fault", [Fault.UNSENT, Fault.UNANSWERED, Fault.HANG, Fault.HANG_DONE])
def test_an_update_whose_answer_was_lost_is_completed_without_taking_anything_out(fault):
    async def scenario():
        c = case(trained(replicas=2))
        await c.manager.start()
        c.world.faults.next("load_weights", [fault])
        await c.manager.update_weights("m", "/v/1", "1")
        assert c.states_seen("m/0") == c.states_seen("m/1") == ["ready"]
        assert {engine.version for engine in c.world.running} == {"1"}
        await c.manager.shutdown()

    run(scenario)


def test_an_update_that_is_answered_with_an_error_and_done_all_the_same_counts():
    async def scenario():
        c = case(trained())
        await c.manager.start()
        load = c.engine().load_weights

        async def refused_but_done(path, version):
            await load(path, version)
            c.world.faults.next("load_weights", [Fault.REFUSED])
            await load(path, version)

        c.engine().load_weights = refused_but_done
        await c.manager.update_weights("m", "/v/1", "1")
        assert c.shown().weight_version == "1"
        await c.manager.shutdown()

    run(scenario)


def test_weights_that_arrive_in_a_drained_role_make_it_serve_with_its_wake_only():
    async def scenario():
        c = case(trained("dcs"))
        await c.manager.start()
        await c.manager.drain()
        await c.manager.broadcast("m", "/v/1", 1)
        assert c.state() is ReplicaState.STARTING
        await c.manager.activate()
        assert c.state() is ReplicaState.READY
        await c.manager.shutdown()

    run(scenario)


def test_one_that_never_served_is_stopped_by_a_deactivate_and_started_by_the_next_wake():
    async def scenario():
        c = case(trained("dcs"))
        await c.manager.start()
        await c.manager.deactivate()
        assert not c.world.running
        assert c.model_state() is ReplicaState.SLEEPING
        await c.manager.broadcast("m", "/v/1", 1)
        await c.manager.activate()
        assert (c.state(), c.shown().generation) == (ReplicaState.READY, 2)
        await c.manager.shutdown()

    run(scenario)


def test_one_that_never_served_and_could_not_be_stopped_at_once_is_started_again_all_the_same():
    async def scenario():
        c = case(trained("dcs"))
        await c.manager.start()
        c.world.faults.next("stop", [Fault.REFUSED])
        with pytest.raises(RoleOperationFailedError, match="could not be stopped"):
            await c.manager.deactivate()
        assert c.shown().blocked and c.manager.residency() == {"m/0": None}
        await c.manager.deactivate()
        assert c.manager.residency() == {}
        await c.manager.broadcast("m", "/v/1", 1)
        await c.manager.activate()
        assert (c.state(), c.shown().generation) == (ReplicaState.READY, 2)
        await c.manager.shutdown()

    run(scenario)


def test_one_of_which_nobody_knows_whether_it_has_the_new_weights_serves_no_more():
    async def scenario():
        c = case(trained())
        await c.manager.start()
        c.world.faults.always("load_weights", Fault.UNSENT)
        with pytest.raises(RoleOperationFailedError, match="502"):
            await c.manager.update_weights("m", "/v/1", "1")
        assert c.shown().blocked and not c.shown().direct_eligible
        assert c.shown().weight_version is None
        c.world.faults.stop()
        await c.manager.unblock("m/0")
        assert (c.state(), c.shown().weight_version) == (ReplicaState.READY, "1")
        await c.manager.shutdown()

    run(scenario)


def test_while_an_answer_is_missing_what_serves_names_the_version_that_is_certain():
    async def scenario():
        c = case(trained(replicas=2))
        await c.manager.start()
        await c.manager.update_weights("m", "/v/1", "1")
        c.world.faults.always("load_weights", Fault.UNSENT)
        update = asyncio.create_task(c.manager.update_weights("m", "/v/2", "2"))
        await asyncio.sleep(0.1)
        c.engine("m/0").crash()
        await c.until(lambda: c.state("m/0") is ReplicaState.DEAD)
        assert (c.state("m/1"), c.shown("m/1").weight_version) == (ReplicaState.READY, "1")
        with pytest.raises(RoleOperationFailedError):
            await update
        assert c.shown("m/1").blocked
        assert not c.violations
        await c.manager.shutdown()

    run(scenario)
