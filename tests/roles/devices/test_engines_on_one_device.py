"""Real engines on simulated devices, as a launcher starts them: who sleeps holds nothing, who does not
fit fails loudly, and who is killed is gone.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from phalanx.device_ledger import DeviceLedger, SimulatedDevice
from phalanx.roles.contracts import ALL_TAGS, EngineCallError, ReplicaLaunch, Tag
from phalanx.roles.placement.planner import plan
from phalanx.roles.replica_devices import SimulatedCluster
from phalanx.roles.sglang_engine import SGLangEngine
from phalanx.schema.job_placement import ClusterSpec, NodeSpec, PlacementRequest
from phalanx.schema.roles import (
    DeploymentSpec,
    EngineGroupSpec,
    InferenceModelSpec,
    InferenceRoleSpec,
    PlacementMode,
    RoutingSpec,
    WorkloadType,
)
from phalanx.testing.tiny_llama import write_tiny_llama
from tests.roles.launching.engines import SMALL, healthy, launching

BUDGET = 4 << 20
ROLES = ("rollout", "teacher")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


class Shared:
    """A rollout and a teacher that take turns on the one device of a machine."""

    def __init__(self, directory: Path, file: Path) -> None:
        roles = tuple(_role(name, directory) for name in ROLES)
        cluster = ClusterSpec((NodeSpec("node", 1),), BUDGET)
        request = PlacementRequest(PlacementMode.DEFER, cluster, roles, trainer_devices=1)
        self.plan = plan(request)
        self.cluster = SimulatedCluster(self.plan, file)
        self.ledger: DeviceLedger = self.cluster.make()

    def launch(self, name: str) -> ReplicaLaunch:
        (spec,) = (role for role in self.plan.roles if role.role == name)
        (model,) = spec.models
        return ReplicaLaunch(name, f"{model.name}/0", 0, model, model.engine_groups[0], 0, 0)

    def held(self) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for one in self.ledger.held():
            found.setdefault(one.owner, set()).add(one.tag)
        return found


def _role(name: str, directory: Path) -> InferenceRoleSpec:
    options = {**SMALL, "native_operators": "off", "dtype": "float32"}
    model = InferenceModelSpec("model", str(directory), (EngineGroupSpec(engine_args=options),))
    return InferenceRoleSpec(
        name, WorkloadType(name), DeploymentSpec(), RoutingSpec(default_model="model"), (model,)
    )


WHOLE = {"weights", "kv_cache"}


def test_i92_an_engine_that_sleeps_holds_nothing_and_one_that_is_killed_neither(
    model_dir, tmp_path
):
    shared = Shared(model_dir, tmp_path / "devices")
    teacher = SimulatedDevice(shared.ledger, 0, "teacher/model/0")

    async def main() -> None:
        async with launching(tmp_path, simulated=shared.cluster) as launcher:
            replica = await launcher.launch(shared.launch("rollout"))
            async with SGLangEngine(replica.url) as engine:
                await healthy(replica, engine)
                assert shared.held() == {"rollout/model/0": WHOLE}
                peak = shared.ledger.peaks()[0]
                await engine.release(ALL_TAGS)
                assert shared.held() == {}
                await engine.resume(frozenset({Tag.WEIGHTS}))
                assert shared.held() == {"rollout/model/0": {"weights"}}
                teacher.take("weights", BUDGET - peak + 1)
                with pytest.raises(EngineCallError, match="teacher/model/0 .* holds") as refused:
                    await engine.resume(ALL_TAGS)
                assert refused.value.out_of_memory and not refused.value.uncertain
                assert await engine.resident() == {Tag.WEIGHTS}
                teacher.give("weights")
                await engine.resume(ALL_TAGS - {Tag.WEIGHTS})
                assert shared.held() == {"rollout/model/0": WHOLE}
            os.kill(replica.pid, signal.SIGKILL)
            assert "SIGKILL" in await replica.exited()
            assert shared.held() == {}
            teacher.take("weights", BUDGET)
            teacher.give("weights")

    asyncio.run(main())


@pytest.mark.long
def test_i65_two_roles_that_are_resident_together_fail_loudly(model_dir, tmp_path):
    shared = Shared(model_dir, tmp_path / "devices")

    async def main() -> None:
        async with launching(tmp_path, simulated=shared.cluster) as launcher:
            rollout = await launcher.launch(shared.launch("rollout"))
            async with SGLangEngine(rollout.url) as engine:
                await healthy(rollout, engine)
                # What a schedule that overlaps would do.
                early = await launcher.launch(shared.launch("teacher"))
                ending = await early.exited()
                assert "ended with status 1" in ending
                assert "simulated device 0 is out of memory: teacher/model/0" in ending
                assert "rollout/model/0" in ending
                assert shared.held() == {"rollout/model/0": WHOLE}
                await engine.release(ALL_TAGS)
                teacher = await launcher.launch(shared.launch("teacher"))
                async with SGLangEngine(teacher.url) as other:
                    await healthy(teacher, other)
                    assert shared.held() == {"teacher/model/0": WHOLE}
                    with pytest.raises(EngineCallError, match="507"):
                        await engine.resume(ALL_TAGS)
                    await other.release(ALL_TAGS)
                    await engine.resume(ALL_TAGS)
                assert shared.held() == {"rollout/model/0": WHOLE}
                assert shared.ledger.peaks()[0] <= BUDGET

    asyncio.run(main())
