"""The manager with real engines and a real sglang-router in front of them: `make test-long`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from phalanx.clock import SystemClock
from phalanx.roles.contracts import Backends
from phalanx.roles.local_launcher import LocalLauncher, LocalLauncherSettings
from phalanx.roles.manager import InferenceManager
from phalanx.roles.publication import initial_content
from phalanx.roles.router_process import RouterStarter
from phalanx.roles.sglang_engine import SGLangEngine
from phalanx.routing.roles.registry import RoleRegistry
from phalanx.routing.roles.snapshot import ReplicaState, RoleModel
from phalanx.schema.roles import (
    DeploymentSpec,
    EngineGroupSpec,
    InferenceModelSpec,
    InferenceRoleSpec,
    RoutingSpec,
    WorkerType,
    WorkloadType,
)
from tests.roles.launching.engines import CONFORMANCE, SMALL
from tests.roles.launching.specs import sglang_group
from tests.roles.launching.test_real_router import pytestmark as only_with_a_router
from tests.roles.launching.test_real_router import routed, settings

pytestmark = only_with_a_router
GREEDY = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}


class Job:
    def __init__(self, model: InferenceModelSpec, logs: Path) -> None:
        times = DeploymentSpec(startup_timeout_s=120.0, drain_timeout_s=60.0)
        spec = InferenceRoleSpec("rollout", WorkloadType.ROLLOUT, times, RoutingSpec(), (model,))
        self.launcher = LocalLauncher(LocalLauncherSettings(logs, programs=CONFORMANCE))
        self.registry = RoleRegistry("rollout", "e", initial_content(spec))
        routers = RouterStarter(settings(logs))
        backends = Backends(self.launcher, SGLangEngine, routers.open)
        self.manager = InferenceManager(spec, backends, self.registry, SystemClock())

    @property
    def model(self) -> RoleModel:
        (model,) = self.registry.snapshot.content.models
        return model

    async def workers(self) -> set[str]:
        async with httpx.AsyncClient() as client:
            listed = (await client.get(f"{self.model.router_url}/workers")).json()["workers"]
        return {worker["url"] for worker in listed}

    async def generate(self) -> httpx.Response:
        async with httpx.AsyncClient(timeout=60.0) as client:
            body = {"text": "The sea", "sampling_params": GREEDY}
            return await client.post(f"{self.model.router_url}/generate", json=body)

    @property
    def addresses(self) -> set[str | None]:
        return {replica.base_url for replica in self.model.replicas}


@asynccontextmanager
async def running(model: InferenceModelSpec, logs: Path) -> AsyncIterator[Job]:
    job = Job(model, logs)
    try:
        # What comes from disk later is what the engines have begun with.
        await job.manager.start()
        if model.needs_weight_update:
            await job.manager.update_weights(model.name, model.model_path, "1")
        yield job
    finally:
        await job.manager.shutdown(0)
        await job.launcher.close()


def test_i37_the_router_knows_the_replicas_that_serve_and_no_others(tiny_llama, tmp_path):
    model = routed(sglang_group(num_replicas=2), path=tiny_llama, elastic_enabled=True)

    async def test() -> None:
        async with running(model, tmp_path) as job:
            assert job.model.state is ReplicaState.READY
            assert await job.workers() == job.addresses and len(job.addresses) == 2
            assert (await job.generate()).status_code == 200
            await job.manager.scale("student", 1)
            assert await job.workers() == job.addresses and len(job.addresses) == 1
            await job.manager.deactivate()
            assert await job.workers() == set()
            await job.manager.activate()
            assert await job.workers() == job.addresses
            answer = (await job.generate()).json()
            assert answer["meta_info"]["weight_version"] == "1"

    asyncio.run(test())


@pytest.mark.parametrize("ours", [True, False], ids=["phalanx", "sglang"])
def test_i42_prefill_and_decode_are_reached_through_the_router(ours, tiny_llama, tmp_path):
    args = SMALL if ours else {}

    def group(kind: WorkerType) -> EngineGroupSpec:
        if ours:
            return EngineGroupSpec(worker_type=kind, engine_args=args)
        return sglang_group(worker_type=kind)

    model = routed(group(WorkerType.PREFILL), group(WorkerType.DECODE), path=tiny_llama)

    async def test() -> None:
        async with running(model, tmp_path) as job:
            assert job.model.state is ReplicaState.READY
            assert not job.model.eligible and not job.model.serving
            assert await job.workers() == job.addresses
            response = await job.generate()
            assert response.status_code == 200, response.text
            assert response.json()["meta_info"]["completion_tokens"] == 4

    asyncio.run(test())
