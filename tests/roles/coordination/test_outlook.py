"""What a role that does not serve says of itself: that it comes, or what brings it."""

from __future__ import annotations

import asyncio

import pytest

from phalanx.errors import RoleOperationError, RoleOperationFailedError
from phalanx.roles.contracts import EngineCallError
from phalanx.roles.coordination.tenants import RoleTenant
from phalanx.testing.role_faults import Fault
from tests.roles.manager.case import Case, EngineGroupSpec, WorkerType, case, model, run

LASTING = {"fault_tolerance_enabled": True}


def told(w: Case) -> tuple[str, str]:
    absence = w.manager.absence()
    return ("", "") if absence is None else (absence.words, absence.remedy)


async def started(w: Case) -> Case:
    await w.manager.start()
    assert told(w) == ("", "")
    return w


def test_a_role_that_has_yet_to_start_or_starts_comes():
    async def scenario():
        w = case()
        tenant = RoleTenant(w.manager)
        assert told(w) == ("model 'm' is starting", "")
        assert tenant.startup_timeout_s == 60.0
        starting = asyncio.create_task(w.manager.start())
        await asyncio.sleep(1.0)
        assert told(w) == ("model 'm' is starting", "")
        await tenant.changed(10.0)
        assert told(w) == ("", "")
        await starting
        await w.manager.shutdown(0.0)
        assert told(w)[1] == "its job is ending"

    run(scenario)


def test_a_dead_replica_comes_back_where_somebody_brings_it():
    async def scenario():
        w = await started(case(model(**LASTING)))
        w.world.faults.next("launch", [Fault.REFUSED])
        w.engine().crash()
        await w.until(lambda: w.model_state() == "dead")
        assert told(w) == ("model 'm' is dead (m/0: it crashed)", "")
        await asyncio.sleep(0.5)
        assert told(w)[1] == "", "it is tried again"
        await w.until(lambda: w.model_state() == "ready")
        assert told(w) == ("", "")
        await w.manager.shutdown(0.0)

    run(scenario)


def test_a_dead_replica_that_nobody_brings_back_says_what_does():
    async def scenario():
        w = await started(case(model(fault_tolerance_enabled=False)))
        w.engine().crash()
        await w.until(lambda: w.model_state() == "dead")
        await asyncio.sleep(5.0)
        assert told(w)[1] == "`phalanx recover rollout/m/0` replaces it"
        recovering = asyncio.create_task(w.manager.recover("m/0"))
        await asyncio.sleep(1.0)
        assert told(w)[1] == "", "somebody replaces it"
        await recovering
        assert told(w) == ("", "")
        await w.manager.shutdown(0.0)

    run(scenario)


def test_a_replica_that_could_not_be_replaced_is_no_more_on_its_way():
    async def scenario():
        w = await started(case(model(fault_tolerance_enabled=False)))
        w.engine().crash()
        await w.until(lambda: w.model_state() == "dead")
        w.world.faults.next("launch", [Fault.REFUSED])
        with pytest.raises(EngineCallError):
            await w.manager.recover("m/0")
        assert told(w)[1] == "`phalanx recover rollout/m/0` replaces it"
        await w.manager.shutdown(0.0)

    run(scenario)


def test_one_that_is_drained_or_sleeps_or_holds_a_part_is_to_be_woken():
    async def scenario():
        w = await started(case())
        await w.manager.drain()
        assert told(w) == ("model 'm' is draining", "`phalanx wake rollout` has it serve")
        await w.manager.deactivate()
        assert told(w) == ("model 'm' is sleeping", "`phalanx wake rollout` has it serve")
        await w.manager.activate(["weights"])
        assert told(w) == ("model 'm' is onloading", "`phalanx wake rollout` has it serve")
        w.world.faults.next("resume", [Fault.SLOW])
        waking = asyncio.create_task(w.manager.activate())
        await asyncio.sleep(0.1)
        assert told(w) == ("model 'm' is onloading", ""), "somebody wakes it"
        await waking
        assert told(w) == ("", "")
        await w.manager.shutdown(0.0)

    run(scenario)


def test_one_without_replicas_is_to_be_scaled():
    async def scenario():
        w = await started(case(model(elastic_enabled=True), model("other")))
        await w.manager.scale("m", 0)
        assert told(w) == (
            "model 'm' is sleeping",
            "`phalanx scale rollout/m 1` gives it a replica",
        )
        scaling = asyncio.create_task(w.manager.scale("m", 1))
        await asyncio.sleep(1.0)
        assert told(w)[1] == ""
        await scaling
        assert told(w) == ("", "")
        await w.manager.shutdown(0.0)

    run(scenario)


def test_one_that_waits_for_a_trainers_weights_is_to_be_brought_some():
    async def scenario():
        w = case(model(weight_source="actor"))
        await w.manager.start()
        words, remedy = told(w)
        assert words == "model 'm' is starting (m/0: it waits for the trainer's weights)"
        assert remedy == (
            "bring it weights first, at POST /v1/roles/rollout/models/m/weights of the control_url"
        )
        await w.manager.update_weights("m", "/v1", "1")
        assert told(w) == ("", "")
        await w.manager.shutdown(0.0)

    run(scenario)


def test_a_blocked_replica_is_to_be_replaced():
    async def scenario():
        w = await started(case(model(**LASTING)))
        w.world.faults.always("release", Fault.UNANSWERED)
        w.world.faults.always("resident", Fault.UNSENT)
        with pytest.raises(RoleOperationFailedError):
            await w.manager.deactivate()
        w.world.faults.stop()
        with pytest.raises(RoleOperationError):
            await w.manager.activate()
        words, remedy = told(w)
        assert "could not be put to sleep" in words
        assert remedy == "`phalanx recover rollout/m/0` replaces it"
        await w.manager.recover("m/0")
        assert told(w) == ("", "")
        await w.manager.shutdown(0.0)

    run(scenario)


def test_every_kind_of_worker_has_to_come():
    async def scenario():
        groups = tuple(
            EngineGroupSpec(worker_type=kind) for kind in (WorkerType.PREFILL, WorkerType.DECODE)
        )
        w = await started(
            case(model(engine_groups=groups, router=True, fault_tolerance_enabled=False))
        )
        w.engine("m/1").crash()
        await w.until(lambda: w.model_state() == "dead")
        await asyncio.sleep(5.0)
        assert told(w)[1] == "`phalanx recover rollout/m/1` replaces it"
        await w.manager.shutdown(0.0)

    run(scenario)
