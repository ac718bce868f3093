"""A job from its start to its end, on fake engines: what is there when, and that nothing stays."""

from __future__ import annotations

import asyncio
import os
import signal
import socket

import httpx
import pytest

from phalanx.errors import ConfigurationError, PhalanxError
from phalanx.roles.control_messages import JobStage
from phalanx.roles.events import EventKind
from phalanx.roles.run_file import NoJobError
from phalanx.testing.role_faults import Fault
from tests.roles.control.jobs import FILE, FakeJob, fake_job
from tests.roles.control.test_gateway_process import pid_at


async def until(job: FakeJob, words: str, kind: EventKind | None = None) -> None:
    """Until an event, of this kind, says so."""
    last = 0
    while True:
        for event in await job.process.events.wait(last, 60.0):
            last = event.number
            if words in event.detail and kind in (None, event.kind):
                return


async def until_asked(job: FakeJob, point: str) -> None:
    while not job.world.faults.asked[point]:  # noqa: ASYNC110 - it tells nobody
        await asyncio.sleep(0)


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def listens(url: str) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    except OSError:
        return False
    writer.close()
    return True


def test_a_job_is_there_when_it_has_started_and_gone_when_it_is_closed(tmp_path):
    async def scenario():
        async with fake_job(tmp_path) as job:
            assert job.process.describe().stage is JobStage.STARTING
            await job.process.start()
            found = job.runs.find("job")
            assert found.control_url == job.process.control_url
            assert found.gateway_url == job.process.gateway_url
            assert found.pid == os.getpid()
            described = job.process.describe()
            assert described.stage is JobStage.RUNNING
            assert described.gateway_up
            (rollout, genrm) = described.roles
            states = [engine.state for engine in rollout.document.models["student"].engines]
            assert states == ["ready", "ready"]
            assert rollout.residency["student/0"] == ("cuda_graph", "kv_cache", "weights")
            assert genrm.unpublished == ()
            async with httpx.AsyncClient(base_url=found.control_url) as client:
                assert (await client.get("/v1/job")).json()["name"] == "job"
            pid = await pid_at(job.process.gateway_url)
        assert is_gone(pid)
        assert job.world.running == ()
        assert job.world.misused == []
        assert not await listens(job.process.control_url)
        with pytest.raises(NoJobError):
            job.runs.find("job")

    asyncio.run(scenario())


def test_i3_the_gateway_is_there_before_any_engine(tmp_path):
    async def scenario():
        async with fake_job(tmp_path) as job:
            job.world.faults.always("launch", Fault.HANG)
            starting = asyncio.create_task(job.process.start())
            await until_asked(job, "launch")
            await pid_at(job.process.gateway_url)
            assert job.process.describe().gateway_up
            assert job.runs.find("job")
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)

    asyncio.run(scenario())


def test_replicas_that_load_are_told_before_they_are_published(tmp_path):
    async def scenario():
        async with fake_job(tmp_path) as job:
            logs = tmp_path / "logs" / "rollout" / "student"
            logs.mkdir(parents=True)
            (logs / "0.1.log").write_text("listening\nloading\n")
            job.world.faults.always("healthy", Fault.HANG)
            starting = asyncio.create_task(job.process.start())
            await until_asked(job, "healthy")
            coming = job.process.describe().roles[0].unpublished
            assert {each.state for each in coming} == {"starting"}
            assert {each.engine_id: each.detail for each in coming}["student/0"] == "loading"
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
        assert job.world.running == ()

    asyncio.run(scenario())


def test_one_that_takes_the_place_of_a_dead_one_is_told_while_it_loads(tmp_path):
    async def scenario():
        async with fake_job(tmp_path) as job:
            await job.process.start()
            job.world.faults.always("healthy", Fault.HANG)
            job.world.engine("student/0", 1).crash()
            await until(job, "2", EventKind.GENERATION)
            role = job.process.describe().roles[0]
            assert role.document.models["student"].engines[0].state == "dead"
            (coming,) = role.unpublished
            assert (coming.engine_id, coming.generation) == ("student/0", 2)
            assert coming.state == "starting"

    asyncio.run(scenario())


def test_one_engine_that_does_not_start_ends_all(tmp_path):
    async def scenario():
        async with fake_job(tmp_path) as job:
            job.world.faults.next("launch", [None, Fault.REFUSED])
            with pytest.raises(PhalanxError):
                await job.process.start()
            pid = await pid_at(job.process.gateway_url)
        assert is_gone(pid)
        assert job.world.running == ()

    asyncio.run(scenario())


@pytest.mark.parametrize("point", ["launch", "healthy", "ready"])
def test_a_stop_at_any_stage_of_the_start_leaves_nothing(tmp_path, point):
    async def scenario():
        async with fake_job(tmp_path) as job:
            job.world.faults.always(point, Fault.HANG)
            starting = asyncio.create_task(job.process.start())
            await until_asked(job, point)
            job.process.stop()
            await job.process.wait()
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
        assert job.world.running == ()
        assert not await listens(job.process.gateway_url)

    asyncio.run(scenario())


def test_a_job_that_was_never_started_closes(tmp_path):
    async def scenario():
        async with fake_job(tmp_path) as job:
            pass
        assert not await listens(job.process.control_url)
        await job.process.close()

    asyncio.run(scenario())


def test_running_requests_end_before_their_engine_does(tmp_path):
    async def scenario():
        async with fake_job(tmp_path) as job:
            await job.process.start()
            request = job.world.engine("student/0").send(0.05)
        assert request.ended == "finished"

    asyncio.run(scenario())


def test_a_stop_that_is_asked_for_twice_waits_for_them(tmp_path):
    async def scenario():
        async with fake_job(tmp_path) as job:
            await job.process.start()
            request = job.world.engine("student/0").send(0.05)
            closing = asyncio.create_task(job.process.close())
            await until(job, "stopping")
            job.process.stop()
            job.process.stop()
            await closing
        assert request.ended == "finished"

    asyncio.run(scenario())


def test_a_second_signal_does_not_wait_for_them(tmp_path):
    async def scenario():
        async with fake_job(tmp_path) as job:
            await job.process.start()
            request = job.world.engine("student/0").send(3600.0)
            closing = asyncio.create_task(job.process.close())
            await until(job, "stopping")
            job.process.interrupt()
            job.process.interrupt()
            await closing
        assert request.ended == "lost"

    asyncio.run(scenario())


@pytest.mark.parametrize("point", ["is_idle", "pause"])
def test_a_second_stop_does_not_wait_for_a_drain_that_gets_no_answer(tmp_path, point):
    async def scenario():
        drain_s = 1e6 if point == "is_idle" else 0.01
        times = f"drain_timeout_s: {drain_s}, offload_timeout_s: 1e6"
        async with fake_job(tmp_path, FILE.replace("drain_timeout_s: 60", times)) as job:
            await job.process.start()
            job.world.engine("student/0").send(3600.0)
            job.world.faults.always(point, Fault.HANG)
            closing = asyncio.create_task(job.process.close())
            await until_asked(job, point)
            job.process.stop(now=True)
            await closing
            told = [event.detail for event in job.process.events.after(0)]
            assert "dead: its job stops at once" in told
        assert job.world.running == ()

    asyncio.run(scenario())


def test_a_killed_gateway_is_there_again_and_its_death_is_told(tmp_path):
    async def scenario():
        async with fake_job(tmp_path) as job:
            await job.process.start()
            os.kill(await pid_at(job.process.gateway_url), signal.SIGKILL)
            await until(job, "the gateway has died: it was killed by SIGKILL")
            await until(job, "the gateway is there again")
            assert await pid_at(job.process.gateway_url)
            assert job.process.describe().gateway_up

    asyncio.run(scenario())


def test_a_dead_engine_is_a_new_generation(tmp_path):
    async def scenario():
        async with fake_job(tmp_path) as job:
            await job.process.start()
            job.world.engine("judge/0", 1).crash()
            registry = job.process.manager("genrm").registry
            snapshot = registry.snapshot
            while True:
                (judge,) = snapshot.content.models
                if [(r.generation, r.serves) for r in judge.replicas] == [(2, True)]:
                    break
                snapshot = await registry.wait(snapshot.revision, 60.0)

    asyncio.run(scenario())


def test_a_taken_port_leaves_nothing_behind(tmp_path):
    async def scenario():
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            for key in ("http_port: 0", "drain_timeout_s: 0.1"):
                text = FILE.replace("{http_port: 0, drain", f"{{http_port: {port}, drain")
                if key != "http_port: 0":
                    text = f"control: {{port: {port}}}\n{FILE}"
                with pytest.raises(ConfigurationError, match=f"{port}"):
                    async with fake_job(tmp_path, text):
                        pass

    asyncio.run(scenario())


def test_a_start_asleep_starts_no_engine(tmp_path):
    async def scenario():
        text = FILE.replace("{drain_timeout_s: 60}", "{start_asleep: true}")
        async with fake_job(tmp_path, text) as job:
            await job.process.start()
            rollout = job.process.describe().roles[0].document
            assert rollout.models["student"].state == "sleeping"
            assert not any(name.startswith("student") for name, _ in job.world.engines)

    asyncio.run(scenario())
