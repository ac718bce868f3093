"""A replica over the GPUs of several machines. `RAY_ADDRESS` names their cluster, and
`PHALANX_TEST_SHARED` a directory that all of them have.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from phalanx.roles.calls import PollPause
from phalanx.roles.engine_command import EnginePrograms
from phalanx.roles.ray_cluster.cluster import RayCluster
from phalanx.roles.sglang_engine import SGLangEngine
from phalanx.schema.roles import EngineGroupSpec
from tests.roles.control.whole_job import post
from tests.roles.launching.specs import launch_of, model_of, write_tiny_llama
from tests.roles.ray_cluster.running import launching

pytestmark = pytest.mark.long


@pytest.fixture
def gpus():
    """A cluster with GPUs on two machines or more."""
    address, shared = os.environ.get("RAY_ADDRESS"), os.environ.get("PHALANX_TEST_SHARED")
    if address is None or shared is None:
        pytest.skip("needs a Ray cluster of 2 machines with GPUs (RAY_ADDRESS); none is given")
    cluster = RayCluster(address, "phalanx-tests", None)
    try:
        found = sum(machine.free > 0 for machine in cluster.machines())
        if found < 2:
            pytest.skip(f"needs 2 machines with free GPUs; the cluster at {address} has {found}")
        yield cluster, Path(shared)
    finally:
        cluster.close()


def test_i49_a_replica_over_the_gpus_of_two_machines_answers(gpus):
    cluster, shared = gpus
    write_tiny_llama(shared)
    group = EngineGroupSpec(
        ranks_per_replica=2,
        nodes_per_replica=2,
        engine_args={"device": "cuda", "pool_tokens": 4096},
    )

    async def main() -> None:
        async with launching(cluster, None, shared / "logs", EnginePrograms()) as launcher:
            replica = await launcher.launch(launch_of(model_of(group, path=str(shared))))
            assert len({part.node.address for part in replica.parts}) == 2
            async with SGLangEngine(replica.url) as engine:
                pause = PollPause()
                while not await engine.ready():
                    await pause.rest()
            sent = {"text": "a b", "sampling_params": {"max_new_tokens": 3}}
            status, answer = await asyncio.to_thread(post, f"{replica.url}/generate", sent)
            assert status == 200 and answer["meta_info"]["completion_tokens"] == 3

    asyncio.run(main())
