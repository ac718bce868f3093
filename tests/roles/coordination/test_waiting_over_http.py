"""The client of phases while a role of a whole job is on its way."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from phalanx.cli.phase_view import phase_lines
from phalanx.client import AsyncPhaseClient
from phalanx.errors import RoleOperationFailedError
from phalanx.testing.role_faults import Fault
from tests.roles.control.jobs import FakeJob, fake_job

FILE = """
gateway: {http_port: 0, drain_timeout_s: 0.1}
placement: {mode: split, nodes: 1, devices_per_node: 3, trainer_devices: 1}
roles:
  rollout: {models: {student: {model: m}}}
  teacher: {models: {big: {model: m}}}
"""


async def waiting(client: AsyncPhaseClient, words: str) -> str:
    """What is shown once somebody waits for what `words` say."""
    document = await client.phases()
    while document.transition is None or words not in document.transition.step:
        document = await client.wait(document.number)
    return "\n".join(phase_lines(document, document.transition.since_wall_s))


async def entering(client: AsyncPhaseClient, job: FakeJob) -> asyncio.Task:
    """The teacher has died, and its next generation is slow to answer."""
    await client.enter("rollout", "1")
    job.world.faults.always("launch", Fault.HANG)
    job.world.engine("big/0").crash()
    teacher = job.process.manager("teacher")
    while teacher.absence() is None:
        await teacher.registry.wait(teacher.registry.snapshot.revision, None)
    return asyncio.create_task(client.enter("teacher", "1"))


def test_i91_a_role_that_comes_back_is_waited_for_and_everybody_sees_it(tmp_path):
    async def scenario():
        async with fake_job(tmp_path, FILE) as job, asyncio.TaskGroup() as tasks:
            starting = tasks.create_task(job.process.start())
            async with AsyncPhaseClient(job.process.control_url) as client:
                # Nobody listens yet, and then its roles start.
                await client.enter("rollout", "1")
                await starting
                going = await entering(client, job)
                shown = await waiting(client, "role 'teacher'")
                assert (
                    "to teacher for 0 s: the job waits until they serve: role 'teacher': model 'big'"
                    " is dead (big/0: it crashed)" in shown
                )
                events = [one for one in job.process.events.after(0) if one.kind == "waiting"]
                assert events[-1].detail.startswith("phase 'teacher' waits until it serves")
                job.world.faults.stop()
                async with httpx.AsyncClient(base_url=job.process.control_url) as control:
                    recover = "/v1/roles/teacher/recover"
                    answer = await control.post(recover, json={"engine_id": "big/0"})
                    assert answer.status_code == 200, "its own operations go on meanwhile"
                assert (await going).phase == "teacher"

    asyncio.run(scenario())


def test_leave_and_the_end_of_the_job_do_not_wait_with_it(tmp_path):
    async def scenario():
        async with fake_job(tmp_path, FILE) as job:
            await job.process.start()
            async with AsyncPhaseClient(job.process.control_url) as client:
                going = await entering(client, job)
                await waiting(client, "role 'teacher'")
                assert (await client.leave()).phase is None
                with pytest.raises(RoleOperationFailedError, match="asked to leave the phase"):
                    await going
                going = asyncio.create_task(client.enter("rollout", "1"))
                await going
                going = asyncio.create_task(client.enter("teacher", "1"))
                await waiting(client, "role 'teacher'")
                await job.process.close()
                going.cancel()

    asyncio.run(scenario())
