"""The manager on real processes behind proxies with faults: those of ours, and those that die as
SGLang does. What users report of engines in section 5 happens here, and does not bring a role down.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from phalanx.clock import SystemClock
from phalanx.errors import RoleOperationFailedError
from phalanx.roles.contracts import Backends
from phalanx.roles.local_launcher import LocalLauncher, LocalLauncherSettings
from phalanx.roles.manager import InferenceManager
from phalanx.roles.publication import initial_content
from phalanx.roles.relax_args import from_relax_args
from phalanx.roles.router_process import RouterSettings, RouterStarter
from phalanx.roles.sglang_engine import SGLangEngine
from phalanx.routing.roles.registry import RoleRegistry
from phalanx.routing.roles.snapshot import ReplicaState, RoleReplica
from phalanx.schema.roles import (
    DeploymentSpec,
    EngineKind,
    InferenceRoleSpec,
    RoutingSpec,
    WeightSource,
    WorkloadType,
)
from phalanx.testing.fault_launcher import FaultyLauncher
from phalanx.testing.faults import FLUSH, RELEASE, RESUME, Fault, FaultKind, lost_response
from tests.roles.launching.engines import CONFORMANCE, model_for

OURS = pytest.param(EngineKind.PHALANX, marks=pytest.mark.long, id="phalanx")
KINDS = [OURS, pytest.param(EngineKind.SGLANG, id="sglang")]
KINDS_LONG = [OURS, pytest.param(EngineKind.SGLANG, marks=pytest.mark.long, id="sglang")]
ENDLESS = {"max_new_tokens": 4000, "ignore_eos": True}
GREEDY = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
ENGINE_ID = "student/0"
FIRST = 1


class Job:
    """One role of one model on this machine."""

    def __init__(self, spec: InferenceRoleSpec, logs: Path) -> None:
        self.launcher = FaultyLauncher(
            LocalLauncher(LocalLauncherSettings(logs, programs=CONFORMANCE))
        )
        self.registry = RoleRegistry(spec.role, "e", initial_content(spec))
        routers = RouterStarter(RouterSettings(logs))
        self.manager = InferenceManager(
            spec,
            Backends(self.launcher, SGLangEngine, routers.open),
            self.registry,
            SystemClock(),
        )

    @property
    def server(self):
        return self.launcher.server(ENGINE_ID)

    @property
    def replica(self) -> RoleReplica:
        (model,) = self.registry.snapshot.content.models
        return next(one for one in model.replicas if one.engine_id == ENGINE_ID)

    async def until(self, condition: Callable[[RoleReplica], bool]) -> RoleReplica:
        while not condition(self.replica):
            await self.registry.wait(self.registry.snapshot.revision, 60.0)
        return self.replica

    async def generate(self, **sampling: object) -> dict:
        async with httpx.AsyncClient(timeout=60.0) as client:
            body = {"text": "The sea", "sampling_params": {**GREEDY, **sampling}}
            response = await client.post(f"{self.replica.base_url}/generate", json=body)
            assert response.status_code == 200, response.text
            return response.json()

    @asynccontextmanager
    async def generating(self) -> AsyncIterator[asyncio.Task[dict]]:
        """A request that ends by an abort only."""
        before = sum(call.path == "/generate" for call in self.server.calls)
        task = asyncio.create_task(self.generate(**ENDLESS))
        await self.server.arrived("/generate", before + 1)
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def asked(self, path: str) -> int:
        return sum(call.path == path for call in self.server.calls)


@asynccontextmanager
async def running(
    kind: EngineKind, model: Path, logs: Path, source: WeightSource = WeightSource.STATIC, **times
) -> AsyncIterator[Job]:
    usual = {"startup_timeout_s": 120.0, "drain_timeout_s": 60.0, "offload_timeout_s": 60.0}
    deployment = DeploymentSpec(**{**usual, "health_interval_s": 0.2, **times})
    models = (model_for(kind, model, source),)
    spec = InferenceRoleSpec("rollout", WorkloadType.ROLLOUT, deployment, RoutingSpec(), models)
    job = Job(spec, logs)
    try:
        await job.manager.start()
        yield job
    finally:
        await job.manager.shutdown(0)
        await job.launcher.close()


def relax_job(logs: Path, model: Path, **arguments: object) -> dict[str, Job]:
    """The roles of Relax's arguments that need no router, on the server that stands for SGLang."""
    roles = from_relax_args({"hf_checkpoint": str(model), "rollout_num_gpus": 1, **arguments})
    return {role.role: Job(role, logs) for role in roles if not role.models[0].needs_router}


def run(test: Callable[[], object]) -> None:
    asyncio.run(test())


@pytest.mark.parametrize("kind", KINDS)
def test_it_sleeps_and_wakes_and_answers_the_same(kind, tiny_llama, tmp_path):
    async def test() -> None:
        async with running(kind, tiny_llama, tmp_path) as job:
            before = (await job.generate())["text"]
            for _ in range(2):
                await job.manager.deactivate()
                await job.manager.deactivate()
                assert job.replica.state is ReplicaState.SLEEPING
                await job.manager.activate()
                await job.manager.activate()
                assert job.replica.state is ReplicaState.READY
            assert (await job.generate())["text"] == before
            assert (job.asked(RELEASE), job.asked(RESUME)) == (2, 2)

    run(test)


@pytest.mark.parametrize("kind", KINDS_LONG)
def test_complaint_dynamo_13823_tag_by_tag_it_is_ready_with_the_last_one(
    kind, tiny_llama, tmp_path
):
    async def test() -> None:
        async with running(kind, tiny_llama, tmp_path) as job:
            await job.manager.deactivate()
            await job.manager.activate(["weights"])
            assert job.replica.state is not ReplicaState.READY
            assert not job.replica.direct_eligible
            await job.manager.activate(["weights"])
            assert job.asked(RESUME) == 1
            await job.manager.activate(["kv_cache", "cuda_graph"])
            assert job.replica.direct_eligible
            assert (await job.generate())["meta_info"]["completion_tokens"] == 4

    run(test)


@pytest.mark.parametrize("kind", KINDS)
def test_complaint_slime_2015_and_sglang_24119_no_request_is_left_when_it_is_offloaded(
    kind, tiny_llama, tmp_path
):
    """A release while one runs would end SGLang; so would a request that comes in between."""

    async def test() -> None:
        async with running(kind, tiny_llama, tmp_path, drain_timeout_s=0.3) as job:
            async with job.generating() as task:
                await job.manager.deactivate()
                answer = await task
            assert answer["meta_info"]["finish_reason"]["type"] == "abort"
            assert job.replica.state is ReplicaState.SLEEPING
            # One that comes too late is held or refused; it ends nothing.
            late = asyncio.create_task(job.generate())
            await job.server.arrived("/generate", 2)
            await job.manager.activate()
            await asyncio.gather(late, return_exceptions=True)
            assert job.replica.state is ReplicaState.READY
            assert (await job.generate())["meta_info"]["completion_tokens"] == 4
            assert job.replica.generation == FIRST

    run(test)


@pytest.mark.parametrize("kind", KINDS_LONG)
@pytest.mark.parametrize(
    "path", ["/pause_generation", "/continue_generation", "/abort_request", FLUSH]
)
def test_complaint_relax_282_a_passing_bad_gateway_ends_nothing(kind, path, tiny_llama, tmp_path):
    async def test() -> None:
        async with running(kind, tiny_llama, tmp_path, drain_timeout_s=0.3) as job:
            job.server.add(Fault(kind=FaultKind.STATUS, path=path, times=1))
            async with job.generating():
                await job.manager.deactivate()
            await job.manager.activate()
            assert job.replica.state is ReplicaState.READY
            assert (await job.generate())["meta_info"]["completion_tokens"] == 4
            assert job.replica.generation == FIRST

    run(test)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(
            Fault(kind=FaultKind.STATUS, path=RELEASE, times=1),
            marks=pytest.mark.long,
            id="bad gateway",
        ),
        pytest.param(
            Fault(kind=FaultKind.STATUS, path=RELEASE, times=1, after=True),
            marks=pytest.mark.long,
            id="bad gateway after it was done",
        ),
        pytest.param(lost_response(RELEASE), id="lost response"),
    ],
)
def test_complaint_relax_282_a_release_of_which_nobody_knows_is_found_out_or_blocks(
    kind, fault, tiny_llama, tmp_path
):
    """Ours says what it holds. Of SGLang's nobody knows, and asking again could end it."""

    async def test() -> None:
        async with running(kind, tiny_llama, tmp_path) as job:
            job.server.add(fault)
            if kind is EngineKind.PHALANX:
                await job.manager.deactivate()
                assert job.replica.state is ReplicaState.SLEEPING
            else:
                with pytest.raises(RoleOperationFailedError):
                    await job.manager.deactivate()
                assert job.replica.blocked and not job.replica.direct_eligible
                assert job.asked(RELEASE) == 1
                # Somebody who looked at the device says what it holds.
                holds = ["kv_cache", "weights", "cuda_graph"] if not fault.after else []
                await job.manager.unblock(ENGINE_ID, holds)
                assert not job.replica.blocked
            await job.manager.activate()
            assert job.replica.state is ReplicaState.READY
            assert (await job.generate())["meta_info"]["completion_tokens"] == 4

    run(test)


@pytest.mark.long
def test_complaint_sglang_24123_a_death_is_noticed_and_another_generation_takes_over(
    tiny_llama, tmp_path
):
    async def test() -> None:
        async with running(EngineKind.SGLANG, tiny_llama, tmp_path) as job:
            address = job.replica.base_url
            async with httpx.AsyncClient() as client:
                with pytest.raises(httpx.TransportError):
                    await client.post(f"{address}{RESUME}", json={"tags": ["weights"]})
            await job.until(lambda replica: replica.state is ReplicaState.DEAD)
            assert "KeyError" in job.replica.detail
            await job.manager.recover(ENGINE_ID)
            assert job.replica.state is ReplicaState.READY
            assert job.replica.generation == FIRST + 1
            assert (await job.generate())["meta_info"]["completion_tokens"] == 4

    run(test)


@pytest.mark.parametrize("kind", KINDS)
def test_complaint_miles_1724_a_recovered_engine_serves_the_newest_weights_only(
    kind, tiny_llama, other_tiny_llama, tmp_path
):
    async def test() -> None:
        async with running(kind, tiny_llama, tmp_path, WeightSource.LOCAL) as job:
            await job.manager.update_weights("student", str(other_tiny_llama), "7")
            wanted = await job.generate()
            assert wanted["meta_info"]["weight_version"] == "7"
            seen = []
            job.registry.listen(
                lambda snapshot: seen.extend(
                    (replica.weight_version, replica.generation)
                    for model in snapshot.content.models
                    for replica in model.replicas
                    if replica.serves
                )
            )
            job.server.crash()
            await job.until(lambda replica: replica.state is ReplicaState.DEAD)
            await job.manager.recover(ENGINE_ID)
            assert ("7", FIRST + 1) in seen and all(version == "7" for version, _ in seen)
            after = await job.generate()
            assert after["meta_info"]["weight_version"] == "7"
            assert after["text"] == wanted["text"]

    run(test)


@pytest.mark.long
def test_a_slow_drain_is_waited_for_and_nothing_is_lost(tiny_llama, tmp_path):
    async def test() -> None:
        async with running(EngineKind.SGLANG, tiny_llama, tmp_path) as job:
            job.server.add(Fault(kind=FaultKind.SLOW_DRAIN, path="/generate"))
            request = asyncio.create_task(job.generate())
            await job.server.arrived("/generate")
            asked = job.asked(FLUSH)
            draining = asyncio.create_task(job.manager.drain())
            await job.until(lambda replica: replica.state is ReplicaState.DRAINING)
            await job.server.arrived(FLUSH, asked + 2)
            assert not draining.done() and not request.done()
            job.server.lift()
            await draining
            assert (await request)["meta_info"]["finish_reason"]["type"] == "length"

    run(test)


@pytest.mark.long
def test_i61_what_relax_s_arguments_describe_runs_as_roles_without_a_facade(tiny_llama, tmp_path):
    """One class of engine and one of manager for both; each has its own specification alone."""
    path = str(tiny_llama)

    async def test() -> None:
        jobs = relax_job(
            tmp_path,
            tiny_llama,
            resource={"actor": [1, 1], "rollout": [1, 1], "genrm": [1, 2], "teacher": [1, 1]},
            fully_async=True,
            sglang_dtype="float16",
            genrm_model_path=path,
            genrm_num_gpus_per_engine=2,
            genrm_engine_config={"max_context_len": 4096},
            use_opd=True,
            opd_type="sglang",
            teacher_hf_checkpoint=path,
            teacher_sglang_mem_fraction_static=0.5,
        )
        assert list(jobs) == ["genrm", "teacher"]
        try:
            told = {}
            for name, job in jobs.items():
                await job.manager.start()
                (replica,) = job.registry.snapshot.content.models[0].replicas
                assert replica.direct_eligible
                async with SGLangEngine(replica.base_url) as engine:
                    assert await engine.ready()
                    assert type(job.manager) is InferenceManager
                async with httpx.AsyncClient() as client:
                    told[name] = (await client.get(f"{replica.base_url}/server_info")).json()
            judge, teacher = told["genrm"], told["teacher"]
            assert (judge["tp_size"], judge["context_length"]) == (2, 4096)
            assert (teacher["tp_size"], teacher["mem_fraction_static"]) == (1, "0.5")
            assert judge["mem_fraction_static"] is None
            assert judge["dtype"] is None and teacher["dtype"] is None
        finally:
            for job in jobs.values():
                await job.manager.shutdown(0)
                await job.launcher.close()

    run(test)
