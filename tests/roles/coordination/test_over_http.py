"""A whole job of fake engines whose roles take turns, asked by the client of its phases."""

from __future__ import annotations

import asyncio
import os

import httpx
import pytest

from phalanx.client import AsyncPhaseClient
from phalanx.errors import (
    ConfigurationError,
    DeadlineExceededError,
    RoleOperationFailedError,
    RoleOperationRefusedError,
)
from phalanx.roles.coordination.journal import FileJournal
from phalanx.testing.role_faults import Fault
from phalanx.wire.phases import Holding
from tests.roles.control.jobs import fake_job
from tests.roles.control.test_control_process import until

FILE = """
gateway: {http_port: 0, drain_timeout_s: 0.1}
placement: {mode: defer, nodes: 1, devices_per_node: 2, trainer_devices: 2}
roles:
  rollout: {models: {student: {model: m, replicas: 2, weight_source: local}}}
  genrm: {models: {judge: {model: m, fault_tolerance: false}}}
  teacher: {models: {big: {model: m}}}
"""


def states(job) -> dict[str, str]:
    return {
        role.document.role: next(iter(role.document.models.values())).state
        for role in job.process.describe().roles
    }


def test_i91_i93_the_client_takes_a_job_through_a_batch(tmp_path):
    async def scenario():
        async with fake_job(tmp_path, FILE) as job:
            await job.process.start()
            assert set(states(job).values()) == {"sleeping"}
            assert job.world.engines == {}, "nothing is started before its phase"
            async with AsyncPhaseClient(job.process.control_url) as client:
                await client.attach("t")
                document = await client.enter("rollout", "1")
                assert document.phase == "rollout"
                assert states(job) == {
                    "rollout": "ready",
                    "genrm": "sleeping",
                    "teacher": "sleeping",
                }
                roles = job.process.describe().roles
                assert {role.document.phase for role in roles} == {"rollout"}
                await client.enter("genrm", "1")
                assert states(job)["rollout"] == "sleeping"
                await client.enter("teacher", "1")
                waiting = asyncio.create_task(client.wait((await client.phases()).number))
                document = await client.enter("train", "1")
                await waiting
                assert document.trainer_holding is Holding.MEMORY
                assert set(states(job).values()) == {"sleeping"}
                assert all(not engine.held for engine in job.world.running)
                with pytest.raises(RoleOperationRefusedError, match="must release them first"):
                    await client.enter("rollout", "2")
                await client.release("t")
                await client.enter("rollout", "2")
                await client.leave(abandon=True)
                assert job.process.describe().phases == await client.phases()
        assert job.world.misused == []

    asyncio.run(scenario())


def test_i94_operators_are_refused_what_the_phases_do(tmp_path):
    async def scenario():
        async with fake_job(tmp_path, FILE) as job:
            await job.process.start()
            async with httpx.AsyncClient(base_url=job.process.control_url) as client:
                words = {
                    "activate": "wake it",
                    "drain": "drain it",
                    "deactivate": "put it to sleep",
                    "phase": "publish its phase",
                }
                for what, told in words.items():
                    body = {"phase": "x"} if what == "phase" else {}
                    answer = await client.post(f"/v1/roles/genrm/{what}", json=body)
                    assert answer.status_code == 409, what
                    message = answer.json()["error"]["message"]
                    assert f"only the phases of the job {told}: `phalanx phase enter" in message
                assert job.world.engines == {}
                pushed = {"path": "/w", "version": "7"}
                answer = await client.post("/v1/roles/rollout/models/student/weights", json=pushed)
                assert answer.status_code == 200
                async with AsyncPhaseClient(job.process.control_url) as phases:
                    await phases.enter("rollout", "1")
                assert job.world.engine("student/0").version == "7"

    asyncio.run(scenario())


def test_i92_who_is_in_a_phase_keeps_a_replica_to_serve_with(tmp_path):
    """A phase is held by roles that serve: of none the devices would be kept for nothing."""

    async def scenario():
        async with fake_job(tmp_path, FILE) as job:
            await job.process.start()
            control = httpx.AsyncClient(base_url=job.process.control_url, timeout=60.0)
            async with control, AsyncPhaseClient(job.process.control_url) as client:
                await client.enter("rollout", "1")
                scale = "/v1/roles/rollout/models/student/scale"
                refused = await control.post(scale, json={"replicas": 0})
                assert refused.status_code == 409
                message = refused.json()["error"]["message"]
                assert "only the phases of the job have it serve nothing" in message
                assert "`phalanx phase leave` puts it to sleep" in message
                document = await client.phases()
                assert document.phase == "rollout"
                assert {lease.holding for lease in document.leases} == {Holding.MEMORY}
                for count in (1, 2):
                    answer = await control.post(scale, json={"replicas": count})
                    assert answer.status_code == 200
                    assert len([one for one in job.world.running if one.held]) == count

    asyncio.run(scenario())


def test_i92_a_replica_that_is_recovered_between_phases_loads_nothing(tmp_path):
    async def scenario():
        async with fake_job(tmp_path, FILE) as job:
            await job.process.start()
            control = httpx.AsyncClient(base_url=job.process.control_url, timeout=60.0)
            async with control, AsyncPhaseClient(job.process.control_url) as client:
                await client.enter("rollout", "1")
                job.world.faults.next("release", [Fault.REFUSED] * 99)
                job.world.engine("student/1").crash()
                job.world.engine("student/0").crash()
                await client.enter("genrm", "1")
                assert [engine.launch.engine_id for engine in job.world.running] == ["judge/0"]
                for path in ("student/0", "student/1"):
                    answer = await control.post(
                        "/v1/roles/rollout/recover", json={"engine_id": path}
                    )
                    assert answer.status_code == 200, answer.text
                assert [engine.launch.engine_id for engine in job.world.running] == ["judge/0"]

    asyncio.run(scenario())


def test_refusals_arrive_as_what_they_are(tmp_path):
    async def scenario():
        async with fake_job(tmp_path, FILE) as job:
            await job.process.start()
            async with AsyncPhaseClient(job.process.control_url) as client:
                with pytest.raises(ConfigurationError, match="there is no phase 'score'"):
                    await client.enter("score", "1")
                with pytest.raises(RoleOperationRefusedError, match="a batch begins with"):
                    await client.enter("genrm", "1")
                with pytest.raises(RoleOperationRefusedError, match="not the trainer"):
                    await client.release("t")
                job.world.faults.always("launch", Fault.REFUSED)
                with pytest.raises(RoleOperationFailedError):
                    await client.enter("rollout", "1")
                assert (await client.phases()).leases[0].holder is None
                job.world.faults.stop()
                await client.enter("rollout", "1")
            with pytest.raises(ConfigurationError, match="control_url"):
                AsyncPhaseClient("http://127.0.0.1:1/v1")

    asyncio.run(scenario())


def test_i94_a_job_without_a_placement_has_phases_that_move_nothing(tmp_path):
    text = FILE.replace("placement:", "#")

    async def scenario():
        async with fake_job(tmp_path, text) as job:
            await job.process.start()
            async with AsyncPhaseClient(job.process.control_url) as client:
                await client.attach("t", pid=os.getpid())
                for phase in ("rollout", "genrm", "teacher", "train"):
                    assert (await client.enter(phase, "1")).mode == "decoupled"
                    assert set(states(job).values()) == {"ready"}
                await client.enter("rollout", "2")

    asyncio.run(scenario())


def test_a_job_that_stops_is_followed_and_hears_its_trainer_until_it_has_stopped(tmp_path):
    async def scenario():
        async with fake_job(tmp_path, FILE) as job:
            await job.process.start()
            async with AsyncPhaseClient(job.process.control_url) as client:
                await client.enter("rollout", "1")
                for name in ("student/0", "student/1"):
                    job.world.engine(name).send(3600.0)
                closing = asyncio.create_task(job.process.close())
                await until(job, "stopping")
                try:
                    before = await client.phases()
                    waiting = asyncio.create_task(client.wait(before.number))
                    assert await client.phases() == before
                    attached = await client.attach("t")
                    assert (await waiting).number == attached.number != before.number
                    with pytest.raises(DeadlineExceededError, match="stopping"):
                        await client.enter("genrm", "1", timeout_s=0.2)
                finally:
                    job.process.stop(now=True)
            await closing
        remembered = FileJournal(tmp_path / "run" / "job.journal").read()
        assert remembered is not None
        assert remembered.state.trainer is not None

    asyncio.run(scenario())
