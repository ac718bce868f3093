"""New replicas are published together when all of them are whole, or nothing is changed at all."""

from __future__ import annotations

import asyncio

import pytest

from phalanx.errors import ConfigurationError, PhalanxError, RoleOperationRefusedError
from phalanx.roles.manager import InferenceManager
from phalanx.routing.roles.snapshot import ReplicaState
from phalanx.schema.roles import WorkloadType
from phalanx.testing.role_fakes import FakeRoleWorld
from phalanx.testing.role_faults import Fault
from tests.roles.manager.case import EngineGroupSpec, EngineKind, WorkerType, case, model, run

PERMANENT = {
    "create": ("launch", Fault.REFUSED),
    "healthy": ("healthy", Fault.HANG),
    "weights": ("load_weights", Fault.REFUSED),
    "router": ("router.add", Fault.REFUSED),
}


def dynamic(**fields):
    return model(weight_source="local", router=True, elastic_enabled=True, **fields)


@pytest.mark.parametrize("step", PERMANENT)
def test_i88_a_fault_in_any_step_leaves_snapshot_and_revision_and_no_candidate(step):
    async def scenario():
        c = case(dynamic(replicas=2), health_interval_s=1000.0)
        await c.manager.start()
        await c.manager.update_weights("m", "/v/2", "2")
        revision, engines = c.revision, set(c.world.running)
        workers = set(c.world.routers["m"].workers)
        c.world.faults.always(*PERMANENT[step])
        with pytest.raises(PhalanxError):
            await c.manager.scale("m", 4)
        assert c.revision == revision
        assert set(c.world.running) == engines
        assert c.world.routers["m"].workers == workers
        c.world.faults.stop()
        await c.manager.scale("m", 4)
        assert c.revision == revision + 1
        assert [c.state(f"m/{n}") for n in range(4)] == [ReplicaState.READY] * 4
        await c.manager.shutdown()

    run(scenario)


@pytest.mark.parametrize("step", PERMANENT)
def test_i75_a_start_that_fails_leaves_nothing_and_can_be_tried_again(step):
    async def scenario():
        c = case(model("other"), dynamic(replicas=2))
        await c.manager.update_weights("m", "/v/2", "2")
        revision = c.revision
        c.world.faults.next(PERMANENT[step][0], [None])
        c.world.faults.always(*PERMANENT[step])
        with pytest.raises(PhalanxError):
            await c.manager.start()
        assert c.revision == revision
        assert not c.world.running
        assert not any(router.is_open for router in c.world.routers.values())
        c.world.faults.stop()
        await c.manager.start()
        assert c.revision == revision + 1
        assert c.model_state("m") is c.model_state("other") is ReplicaState.READY
        await c.manager.shutdown()

    run(scenario)


def test_i87_the_steps_of_a_publication_come_in_their_order():
    async def scenario():
        c = case(dynamic())
        assert c.revision == 0
        await c.manager.update_weights("m", "/v/2", "2")
        steps = []
        strike = c.world.faults.strike

        async def noted(point, act, **more):
            await strike(point, act, **more)
            steps.append(point)

        c.world.faults.strike = noted
        c.registry.listen(lambda snapshot: steps.append(f"revision {snapshot.revision}"))
        await c.manager.start()
        order = ["launch", "healthy", "load_weights", "router.add", "revision 2"]
        assert [step for step in steps if step in order and step != "healthy"] == [
            step for step in order if step != "healthy"
        ]
        assert steps.index("launch") < steps.index("healthy") < steps.index("load_weights")
        assert steps[-1] == "revision 2"
        await c.manager.shutdown()

    run(scenario)


def test_one_that_ends_while_others_come_up_undoes_them_all_at_once():
    async def scenario():
        c = case(model(replicas=3), startup_timeout_s=600.0)
        start = asyncio.create_task(c.manager.start())
        await asyncio.sleep(1.0)
        c.engine("m/1").crash()
        before_s = asyncio.get_running_loop().time()
        with pytest.raises(PhalanxError, match="m/1 died: it crashed"):
            await start
        assert asyncio.get_running_loop().time() - before_s < 5.0
        assert not c.world.running
        await c.manager.shutdown()

    run(scenario)


def test_i51_the_revision_grows_with_scale_restart_and_recovery():
    async def scenario():
        c = case(model(elastic_enabled=True, fault_tolerance_enabled=True))
        revisions = [c.revision]

        def grown() -> bool:
            revisions.append(c.revision)
            return revisions[-1] > revisions[-2]

        await c.manager.start()
        assert grown()
        await c.manager.scale("m", 3)
        assert grown()
        await c.manager.scale("m", 2)
        assert grown()
        url = c.shown().base_url
        c.engine().crash()
        await c.until(lambda: c.state() is ReplicaState.DEAD)
        assert grown()
        await c.until(lambda: c.state() is ReplicaState.READY)
        assert grown()
        assert c.shown().base_url != url
        c.manager.set_phase("score")
        assert grown()
        await c.manager.shutdown()

    run(scenario)


def test_i52_d5_the_same_again_leaves_the_revision_which_never_goes_back_in_its_epoch():
    async def scenario():
        c = case(model(elastic_enabled=True))
        await c.manager.start()
        c.manager.set_phase("score")
        revision = c.revision
        c.manager.set_phase("score")
        for _ in range(2):
            await c.manager.start()
            await c.manager.activate()
            await c.manager.scale("m", 1)
            await c.manager.unblock("m/0")
        assert c.revision == revision
        await c.manager.deactivate()
        await c.manager.activate()
        await c.manager.shutdown()
        assert [s.revision for s in c.snapshots] == list(range(len(c.snapshots)))
        assert {s.epoch for s in c.snapshots} == {"e"}

    run(scenario)


def test_i48_engine_ids_are_model_and_ordinal_and_generations_go_on_after_scaling():
    async def scenario():
        c = case(model(replicas=2, elastic_enabled=True))
        await c.manager.start()
        await c.manager.scale("m", 1)
        await c.manager.scale("m", 2)
        assert [c.shown(f"m/{n}").generation for n in (0, 1)] == [1, 2]
        assert c.shown("m/1").server_id == "m/1@2"
        await c.manager.shutdown()

    run(scenario)


def test_scaling_is_refused_where_the_model_does_not_allow_it():
    external = EngineGroupSpec(1, engine=EngineKind.EXTERNAL, urls=("http://a:1",))
    pair = (EngineGroupSpec(1), EngineGroupSpec(1))

    async def scenario():
        c = case(
            model("fixed"),
            model("elsewhere", engine_groups=(external,), elastic_enabled=True),
            model("two", engine_groups=pair, elastic_enabled=True),
            model("m", elastic_enabled=True),
        )
        for name, words in (("fixed", "elastic"), ("elsewhere", "external"), ("two", "2 engine")):
            with pytest.raises(ConfigurationError, match=words):
                await c.manager.scale(name, 2)
        with pytest.raises(ConfigurationError, match="replicas=-1"):
            await c.manager.scale("m", -1)
        await c.manager.start()
        await c.manager.deactivate()
        with pytest.raises(RoleOperationRefusedError, match="wake it"):
            await c.manager.scale("m", 2)
        await c.manager.activate()
        await c.manager.scale("m", 0)
        assert c.model_state() is ReplicaState.SLEEPING
        await c.manager.scale("m", 1)
        assert c.model_state() is ReplicaState.READY
        await c.manager.shutdown()

    run(scenario)


def test_i50_prefill_and_decode_are_ready_together_behind_the_router():
    groups = (
        EngineGroupSpec(1, worker_type=WorkerType.PREFILL),
        EngineGroupSpec(1, worker_type=WorkerType.DECODE),
    )

    async def scenario():
        c = case(model(engine_groups=groups, router=True))
        await c.manager.start()
        assert c.model_state() is ReplicaState.READY
        assert not any(r.direct_eligible for r in c.registry.snapshot.content.models[0].replicas)
        assert len(c.world.routers["m"].workers) == 2
        c.engine("m/1").crash()
        await c.until(lambda: c.state("m/1") is ReplicaState.DEAD)
        assert c.model_state() is ReplicaState.DEAD
        await c.manager.shutdown()

    run(scenario)


def test_i18_addresses_that_are_not_exposed_make_no_replica_eligible_to_others():
    async def scenario():
        c = case()
        object.__setattr__(c.spec, "expose_engine_urls", False)
        await c.manager.start()
        assert c.shown().serves and not c.shown().direct_eligible
        await c.manager.shutdown()

    run(scenario)


def test_external_engines_are_neither_started_nor_stopped_and_woken_where_they_sleep():
    external = EngineGroupSpec(1, engine=EngineKind.EXTERNAL, urls=("http://a:1",))

    async def scenario():
        c = case(model(engine_groups=(external,)), world=FakeRoleWorld(keeps_weights=True))
        start = asyncio.create_task(c.manager.start())
        await asyncio.sleep(0.1)
        c.engine().held = frozenset({"weights"})
        await start
        assert c.engine().log[0] == "resume cuda_graph,kv_cache"
        request = c.engine().send(1000.0)
        await c.manager.shutdown()
        assert c.engine().is_up and not request.ended
        await c.world.close()

    run(scenario)


def test_one_that_dies_when_it_is_whole_and_others_are_not_undoes_them_all():
    async def scenario():
        c = case(dynamic(replicas=2))
        await c.manager.update_weights("m", "/v/2", "2")
        revision = c.revision
        c.world.faults.next("load_weights", [None, Fault.SLOW])
        start = asyncio.create_task(c.manager.start())
        await asyncio.sleep(4.0)
        whole = next(engine for engine in c.world.running if "ready" in engine.log)
        assert len(c.world.running) == 2 and len(c.world.routers["m"].workers) == 1
        whole.crash()
        with pytest.raises(PhalanxError, match="died: it crashed"):
            await start
        assert c.revision == revision
        assert not c.world.running
        c.manager.set_phase("score")
        assert c.registry.snapshot.content.models[0].replicas == ()
        await c.manager.shutdown()

    run(scenario)


@pytest.mark.parametrize("workload", list(WorkloadType))
def test_i4_one_manager_class_runs_every_role(workload):
    async def scenario():
        c = case(model(replicas=2), workload=workload)
        await c.manager.start()
        await c.manager.deactivate()
        await c.manager.activate()
        assert c.registry.snapshot.content.workload is workload
        assert c.model_state() is ReplicaState.READY
        await c.manager.shutdown()

    assert InferenceManager.__subclasses__() == []
    run(scenario)


def test_a_first_wake_that_fails_leaves_the_role_asleep():
    async def scenario():
        c = case(start_asleep=True)
        c.world.faults.next("launch", [Fault.REFUSED])
        with pytest.raises(PhalanxError, match="refused"):
            await c.manager.activate()
        c.manager.set_phase("score")
        assert c.model_state() is ReplicaState.SLEEPING
        await c.manager.activate()
        assert c.model_state() is ReplicaState.READY
        await c.manager.shutdown()

    run(scenario)


def test_a_scale_out_of_which_one_dies_when_it_is_whole_adds_nothing():
    async def scenario():
        c = case(dynamic(), health_interval_s=1000.0)
        await c.manager.start()
        revision = c.revision
        c.world.faults.next("ready", [None, Fault.SLOW])
        scale = asyncio.create_task(c.manager.scale("m", 3))
        await asyncio.sleep(4.0)
        router = c.world.routers["m"]
        whole = next(e for e in c.world.running[1:] if e.url in router.workers)
        whole.crash()
        with pytest.raises(PhalanxError, match="died: it crashed"):
            await scale
        assert c.revision == revision
        assert [engine.url for engine in c.world.running] == list(router.workers)
        assert await c.manager.scale("m", 3) is None
        assert len(c.world.running) == 3
        await c.manager.shutdown()

    run(scenario)
