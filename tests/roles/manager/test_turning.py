"""Waking, draining and putting to sleep: once each, whatever is asked how often."""

from __future__ import annotations

import asyncio

import pytest

from phalanx.errors import ConfigurationError
from phalanx.roles.contracts import ALL_TAGS, EngineCallError
from phalanx.routing.roles.snapshot import ReplicaState
from phalanx.schema.roles import ModelPlacement, Ownership, PlacementMode
from phalanx.testing.role_fakes import FakeRoleWorld
from phalanx.testing.role_faults import Fault
from tests.roles.manager.case import EngineGroupSpec, EngineKind, case, model, run

CYCLE = ["starting", "ready", "draining", "sleeping", "onloading", "ready"]


def test_i80_activate_on_ready_asks_no_engine():
    async def scenario():
        c = case()
        await c.manager.start()
        before, revision = list(c.engine().log), c.revision
        await c.manager.activate()
        await c.manager.activate(["weights"])
        assert (c.engine().log, c.revision) == (before, revision)
        await c.manager.shutdown()

    run(scenario)


def test_i82_i83_a_cycle_of_operations_done_twice_calls_the_engine_as_if_done_once():
    logs = []

    def cycle(times):
        async def scenario():
            c = case(model(replicas=2))
            for operation in ("start", "activate", "drain", "deactivate", "activate", "shutdown"):
                for _ in range(times):
                    await getattr(c.manager, operation)()
            logs.append([c.engine(name).log for name in ("m/0", "m/1")])
            assert not c.world.misused
            assert c.revision == len(c.snapshots) - 1

        return scenario

    run(cycle(1))
    run(cycle(2))
    assert logs[0] == logs[1]
    tags = "cuda_graph,kv_cache,weights"
    assert logs[0][0] == [
        "ready", "pause", f"release {tags}", f"resume {tags}", "go_on", "ready", "stop", "close",
    ]  # fmt: skip


def test_i82_drain_is_told_before_anything_is_done_and_waits_for_what_runs():
    async def scenario():
        c = case()
        await c.manager.start()
        request = c.engine().send(10.0)
        drain = asyncio.create_task(c.manager.drain())
        await c.until(lambda: c.state() is ReplicaState.DRAINING)
        assert not request.ended
        assert not c.shown().direct_eligible
        await drain
        assert request.ended == "finished"
        assert c.manager.residency() == {"m/0": ALL_TAGS}
        await c.manager.shutdown()

    run(scenario)


def test_i82_what_still_runs_at_the_deadline_is_aborted():
    async def scenario():
        c = case(drain_timeout_s=5.0)
        await c.manager.start()
        request = c.engine().send(1000.0)
        await c.manager.drain()
        assert request.ended == "aborted"
        assert c.engine().paused
        await c.manager.activate()
        assert c.states_seen() == ["ready", "draining", "onloading", "ready"]
        assert c.engine().send(1.0).started
        await c.manager.shutdown()

    run(scenario)


def test_i83_deactivate_drains_gives_all_memory_back_and_does_nothing_the_second_time():
    async def scenario():
        c = case()
        await c.manager.start()
        request = c.engine().send(3.0)
        await c.manager.deactivate()
        assert request.ended == "finished"
        assert c.engine().held == frozenset()
        assert c.manager.residency() == {"m/0": frozenset()}
        assert c.states_seen() == ["ready", "draining", "sleeping"]
        log = list(c.engine().log)
        await c.manager.deactivate()
        await c.manager.drain()
        assert c.engine().log == log
        await c.manager.shutdown()

    run(scenario)


def test_i81_only_missing_tags_are_resumed_and_ready_needs_all_of_them():
    async def scenario():
        c = case()
        await c.manager.start()
        await c.manager.deactivate()
        await c.manager.activate(["weights"])
        await c.manager.activate(["weights"])
        assert c.state() is ReplicaState.ONLOADING
        assert c.engine().held == {"weights"}
        await c.manager.activate(["kv_cache", "weights"])
        assert c.state() is ReplicaState.ONLOADING
        await c.manager.activate()
        assert c.state() is ReplicaState.READY
        resumes = [line for line in c.engine().log if line.startswith("resume")]
        assert resumes == ["resume weights", "resume kv_cache", "resume cuda_graph"]
        assert c.engine().log.count("go_on") == 1
        await c.manager.shutdown()

    run(scenario)


def test_complaint_dynamo_13823_two_tagged_wakes_are_two_and_ready_comes_after_the_second():
    async def scenario():
        c = case()
        await c.manager.start()
        await c.manager.deactivate()
        await c.manager.activate(["weights"])
        assert not c.shown().direct_eligible
        assert c.engine().paused
        await c.manager.activate(["kv_cache", "cuda_graph"])
        assert c.shown().direct_eligible
        assert c.engine().held == ALL_TAGS
        await c.manager.shutdown()

    run(scenario)


def test_i81_a_partial_wake_can_be_put_back_to_sleep():
    async def scenario():
        c = case(world=FakeRoleWorld(says=False, keeps_weights=True))
        await c.manager.start()
        await c.manager.deactivate()
        await c.manager.activate(["weights"])
        await c.manager.deactivate()
        assert c.state() is ReplicaState.SLEEPING
        assert c.engine().held == frozenset()
        await c.manager.activate()
        assert c.state() is ReplicaState.READY
        assert not c.world.misused
        await c.manager.shutdown()

    run(scenario)


def test_complaint_sglang_24123_no_engine_is_asked_for_what_it_has_done_already():
    async def scenario():
        c = case(model(replicas=2), world=FakeRoleWorld(says=False, keeps_weights=True))
        await c.manager.start()
        for _ in range(2):
            await asyncio.gather(c.manager.deactivate(), c.manager.deactivate())
            await c.manager.deactivate()
            await asyncio.gather(*(c.manager.activate(tags) for tags in (["weights"], None, None)))
            await c.manager.activate(["kv_cache"])
        assert not c.world.misused
        assert all(engine.is_up for engine in c.world.engines.values())
        assert c.model_state() is ReplicaState.READY
        await c.manager.shutdown()

    run(scenario)


def test_i86_what_an_engine_would_crash_on_crashes_the_fake_one_and_is_never_asked():
    async def scenario():
        c = case(model(replicas=3), world=FakeRoleWorld(says=False, keeps_weights=True))
        await c.manager.start()
        tags = frozenset({"weights"})
        busy, held, twice = (c.engine(f"m/{n}") for n in range(3))
        await twice.pause()
        await twice.release(tags)
        assert not c.world.misused
        for call in (busy.release, held.resume, twice.release):
            with pytest.raises(EngineCallError):
                await call(tags)
        assert [len(c.world.misused), len(c.world.running)] == [3, 0]
        await c.manager.shutdown()

    run(scenario)


def test_unknown_tags_are_refused():
    async def scenario():
        c = case()
        with pytest.raises(ConfigurationError, match="kv.*cuda_graph, kv_cache, weights"):
            await c.manager.activate(["kv"])

    run(scenario)


def test_i85_concurrent_duplicates_share_one_operation_and_a_caller_that_leaves_ends_nothing():
    async def scenario():
        c = case()
        await asyncio.gather(*(c.manager.start() for _ in range(3)))
        assert len(c.world.engines) == 1
        first = asyncio.create_task(c.manager.deactivate())
        others = [asyncio.create_task(c.manager.deactivate()) for _ in range(2)]
        await c.until(lambda: c.state() is ReplicaState.DRAINING)
        first.cancel()
        await asyncio.gather(*others)
        assert first.cancelled()
        assert c.engine().log.count("pause") == 1
        assert c.state() is ReplicaState.SLEEPING
        await c.manager.shutdown()

    run(scenario)


def test_i85_an_operation_is_not_shared_across_another_one():
    async def scenario():
        c = case()
        await c.manager.start()
        await asyncio.gather(c.manager.deactivate(), c.manager.activate(), c.manager.deactivate())
        assert c.state() is ReplicaState.SLEEPING
        assert c.states_seen() == [*CYCLE[1:], "draining", "sleeping"]
        await c.manager.shutdown()

    run(scenario)


def test_i90_removal_is_the_mirror_image_of_publication():
    async def scenario():
        c = case(model(replicas=2, router=True, elastic_enabled=True))
        await c.manager.start()
        engine, router = c.engine("m/1"), c.world.routers["m"]
        request = engine.send(5.0)
        steps = []

        def watch(snapshot):
            shown = c.shown("m/1")
            steps.append(
                (shown.state if shown else None, engine.url in router.workers, engine.is_up)
            )

        c.registry.listen(watch)
        revision = c.revision
        scale = asyncio.create_task(c.manager.scale("m", 1))
        await c.until(lambda: c.state("m/1") is ReplicaState.DRAINING)
        await asyncio.sleep(1.0)
        assert engine.url not in router.workers and engine.is_up and not request.ended
        await scale
        assert request.ended == "finished"
        assert steps[0] == (ReplicaState.DRAINING, True, True)
        assert steps[-1] == (None, False, False)
        assert c.revision >= revision + 2
        await c.manager.shutdown()

    run(scenario)


def test_d8_removal_is_told_then_unrouted_then_drained_then_stopped_then_told_again():
    async def scenario():
        c = case(model(replicas=2, router=True, elastic_enabled=True), health_interval_s=1000.0)
        await c.manager.start()
        steps, strike = [], c.world.faults.strike

        async def noted(point, act, **more):
            if steps[-1:] != [point]:
                steps.append(point)
            await strike(point, act, **more)

        c.world.faults.strike = noted
        c.registry.listen(lambda snapshot: steps.append(c.state("m/1")))
        await c.manager.scale("m", 1)
        assert steps[:4] == [ReplicaState.DRAINING, "router.remove", "is_idle", "stop"]
        assert steps[-1] is None
        await c.manager.shutdown()

    run(scenario)


def test_i53_nothing_but_ready_is_eligible():
    async def scenario():
        c = case()
        await c.manager.start()
        await c.manager.deactivate()
        await c.manager.activate()
        for snapshot in c.snapshots:
            for replica in snapshot.content.models[0].replicas:
                assert replica.direct_eligible == (replica.state is ReplicaState.READY)
        await c.manager.shutdown()

    run(scenario)


def test_a_role_that_starts_asleep_starts_with_its_first_wake():
    async def scenario():
        c = case(start_asleep=True)
        await c.manager.start()
        assert c.model_state() is ReplicaState.SLEEPING
        assert not c.world.engines
        await c.manager.activate(["weights"])
        assert not c.world.engines
        await c.manager.activate()
        assert c.model_state() is ReplicaState.READY
        await c.manager.shutdown()

    run(scenario)


def test_a_refused_release_asks_one_without_its_cache_for_no_flush():
    async def scenario():
        c = case(world=FakeRoleWorld(says=False))
        await c.manager.start()
        await c.manager.deactivate()
        await c.manager.activate(["weights"])
        c.world.faults.next("release", [Fault.REFUSED])
        await c.manager.deactivate()
        assert not c.world.misused
        assert c.manager.residency() == {"m/0": frozenset()}
        await c.manager.shutdown()

    run(scenario)


MINE = ModelPlacement(Ownership.CONTROLLER, (0,), (0,), "actor", "score")
THEIRS = EngineGroupSpec(engine=EngineKind.EXTERNAL, urls=("http://127.0.0.1:1",))


@pytest.mark.parametrize("placed", [True, False])
def test_i74_an_external_engine_of_a_role_that_takes_turns_is_somebody_elses_to_put_to_sleep(
    placed,
):
    """But where the role is on devices of nobody's else, its operator's word is meant for it."""

    async def scenario():
        own = EngineGroupSpec(placement=MINE if placed else None)
        c = case(
            model("m", engine_groups=(own,)),
            model("theirs", engine_groups=(THEIRS,)),
            placement=PlacementMode.DEFER,
            start_asleep=True,
        )
        await c.manager.start()
        await c.manager.activate()
        await c.manager.deactivate()
        assert c.state("m/0") is ReplicaState.SLEEPING
        stays = ReplicaState.READY if placed else ReplicaState.SLEEPING
        assert c.state("theirs/0") is stays and c.model_state("theirs") is stays
        assert bool(c.engine("theirs/0").held) is placed
        held = c.manager.residency()
        assert (held["m/0"], held["theirs/0"]) == (frozenset(), ALL_TAGS if placed else frozenset())
        assert not any(c.manager.residency(in_turns=True).values())
        await c.manager.activate()
        assert c.states_seen("theirs/0") == (["ready"] if placed else CYCLE[1:])
        assert c.state("m/0") is ReplicaState.READY
        await c.manager.shutdown()
        assert not c.violations

    run(scenario)
