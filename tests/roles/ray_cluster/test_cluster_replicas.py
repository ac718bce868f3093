"""Replicas beyond a plan, over several machines, and on machines that are lost."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import ray

from phalanx.errors import ConfigurationError
from phalanx.roles.calls import PollPause
from phalanx.roles.contracts import EngineCallError
from phalanx.roles.ray_cluster.binder import RayBinder
from phalanx.roles.ray_cluster.host import HostSettings
from phalanx.roles.ray_cluster.launcher import RayLauncher
from phalanx.roles.ray_cluster.machines import NoRoomError
from phalanx.roles.sglang_engine import SGLangEngine
from phalanx.schema.roles import EngineGroupSpec, PlacementMode
from tests.roles.control.whole_job import post
from tests.roles.launching.processes import wait_for_end, watched
from tests.roles.launching.specs import launch_of, write_tiny_llama
from tests.roles.ray_cluster.plans import planned, role_of
from tests.roles.ray_cluster.running import (
    SERVER,
    TELLING,
    actors_there,
    all_free,
    bound,
    groups_there,
    healthy,
    launching,
    pids,
    sglang,
)

pytestmark = pytest.mark.long


async def written(log: Path) -> str:
    """What a process says that tells what it saw, when it has said it."""
    pause = PollPause()
    while not (said := last_line(log)).endswith("]\n"):
        await pause.rest()
    return said


def last_line(log: Path) -> str:
    return log.read_text().splitlines(keepends=True)[-1] if log.exists() else ""


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def test_a_replica_beyond_the_plan_has_a_group_of_its_own_which_ends_with_it(cluster, tmp_path):
    plan = planned([role_of("rollout", sglang(), elastic_enabled=True)], 4)

    async def main() -> None:
        async with (
            bound(cluster, plan) as made,
            launching(cluster, made, tmp_path, extra_s=1.0) as launcher,
        ):
            launch = launch_of(plan.roles[0].models[0], 1, generation=3)
            replica = await launcher.launch(launch)
            assert groups_there() == {"job-rollout", "job-rollout-rollout/1.3"}
            assert launcher.num_running == 1
            await replica.stop(5.0)
            assert launcher.num_running == 0
            assert groups_there() == {"job-rollout"}
            taken = await cluster.create_group("theirs", [{"GPU": 1}] * 7, "PACK", 10.0)
            with pytest.raises(NoRoomError, match=r"needs 1 device .*has 0 free"):
                await launcher.launch(launch)
            assert groups_there() == {"job-rollout", "theirs"} and not actors_there()
            await cluster.remove_group(taken)

    asyncio.run(main())


def test_i75_a_start_that_is_refused_leaves_nothing(cluster, tmp_path):
    plan = planned([role_of("rollout", sglang(engine_args={"port": 1}))], 4)

    async def main() -> None:
        async with bound(cluster, plan) as made, launching(cluster, made, tmp_path) as launcher:
            for ordinal in (0, 1):
                with pytest.raises(ConfigurationError, match=r"on 127.0.0.\d: .*has 'port'"):
                    await launcher.launch(launch_of(plan.roles[0].models[0], ordinal))
            assert groups_there() == {"job-rollout"} and not actors_there()

    asyncio.run(main())


def test_i49_a_replica_over_machines_is_its_head_and_dies_with_any_part(cluster, tmp_path):
    plan = planned([role_of("rollout", sglang(ranks_per_replica=8, nodes_per_replica=2))], 4, 4)

    async def main() -> None:
        async with (
            bound(cluster, plan) as made,
            launching(cluster, made, tmp_path, TELLING) as launcher,
        ):
            replica = await launcher.launch(launch_of(plan.roles[0].models[0]))
            head, follower = replica.parts
            assert replica.url.startswith(f"http://{head.node.address}:")
            assert head.node.address != follower.node.address
            logs = tmp_path / "rollout" / "rollout"
            seen = [json.loads(await written(logs / name)) for name in ("0.0.log", "0.0.node1.log")]
            meeting = {words[words.index("--dist-init-addr") + 1] for words, _ in seen}
            assert len(meeting) == 1 and meeting.pop().startswith(f"{head.node.address}:")
            for rank, (words, environment) in enumerate(seen):
                assert words[words.index("--node-rank") + 1] == str(rank)
                assert words[words.index("--nnodes") + 1] == "2"
                assert words[words.index("--tp-size") + 1] == "8"
                assert environment["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
                assert "PHALANX_NODE_KEY" not in environment  # it would be nothing to SGLang
                assert "RAY_JOB_ID" not in environment and "OMP_NUM_THREADS" not in environment
            with watched(*pids([replica])) as processes:
                exited = asyncio.ensure_future(replica.exited())
                ray.get(ray.remote(kill).options(num_cpus=0).remote(follower.pid))
                said = await exited
                assert said.startswith("part 2 of 2 has ended") and "SIGKILL" in said
                await replica.stop(0.0)
                wait_for_end(processes)

    asyncio.run(main())


def node_key_of(pid: int) -> str:
    variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
    (key,) = [line.partition("=")[2] for line in variables if line.startswith("PHALANX_NODE_KEY=")]
    return key


def test_i49_a_real_engine_over_two_machines_answers_from_its_head(cluster, tmp_path):
    write_tiny_llama(tmp_path)
    args = {"device": "cpu", "pool_tokens": 4096, "num_threads": 1, "native_operators": "off"}
    spread = EngineGroupSpec(ranks_per_replica=2, nodes_per_replica=2, engine_args=args)
    local = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    role = role_of("rollout", spread, env_vars=local)
    model = replace(role.models[0], model_path=str(tmp_path))

    async def main() -> None:
        async with launching(cluster, None, tmp_path / "logs") as launcher:
            replica = await launcher.launch(launch_of(model))
            head, follower = replica.parts
            assert head.node.address != follower.node.address
            await healthy(replica)
            async with SGLangEngine(replica.url) as engine:
                pause = PollPause()
                while not await engine.ready():
                    await pause.rest()
            sent = {"text": "a b", "sampling_params": {"max_new_tokens": 3}}
            status, answer = await asyncio.to_thread(post, f"{replica.url}/generate", sent)
            assert status == 200 and answer["meta_info"]["completion_tokens"] == 3
            keys = [node_key_of(part.pid) for part in replica.parts]
            assert len(keys) == 2 and keys[0] == keys[1] != ""  # made for these two
            with watched(*pids([replica])) as processes:
                ray.get(ray.remote(kill).options(num_cpus=0).remote(follower.pid))
                assert "part 2 of 2 has ended" in await replica.exited()
                await replica.stop(0.0)
                wait_for_end(processes)
            assert not groups_there() and not actors_there()
        await all_free(cluster)

    asyncio.run(main())


def test_losing_a_machine_takes_what_ran_there_and_nothing_else(machines, cluster, tmp_path):
    plan = planned(
        [role_of("rollout", sglang(num_replicas=2))], 1, 1, names=["127.0.0.2", "127.0.0.3"]
    )
    shared = planned(
        [role_of("rollout", sglang(num_replicas=2))],
        1,
        1,
        names=["127.0.0.2", "127.0.0.3"],
        mode=PlacementMode.SPLIT,
    )

    async def main() -> None:
        async with bound(cluster, plan) as made, launching(cluster, made, tmp_path) as launcher:
            model = plan.roles[0].models[0]
            kept, lost = [await launcher.launch(launch_of(model, n)) for n in range(2)]
            assert [each.parts[0].node.address for each in (kept, lost)] == list(machines.addresses)
            await healthy(kept)
            both = await RayBinder(cluster, "shared", 10.0).bind(shared)
            exits = [asyncio.ensure_future(each.exited()) for each in (kept, lost)]
            with watched(*pids([kept, lost])) as processes:
                machines.lose("127.0.0.3")
                assert await exits[1] == "its machine 127.0.0.3 was lost"
                await lost.stop(0.0)
                wait_for_end(processes[1:])
                assert not exits[0].done()
                await healthy(kept)
                # The next generation runs where there is room, in a group of its own.
                again = await launcher.launch(launch_of(model, 1, generation=1))
                assert again.parts[0].node.address == "127.0.0.2"
                await again.stop(0.0)
                with pytest.raises(EngineCallError, match="have one of that address join"):
                    other = RayLauncher(
                        cluster, both, HostSettings(str(tmp_path), SERVER), "shared"
                    )
                    await other.launch(launch_of(shared.roles[0].models[0], 1))
                await kept.stop(5.0)
            exits[0].cancel()
            for group in both.groups.values():
                await group.delete()
        machines.add("127.0.0.3", 4)
        await all_free(cluster)

    asyncio.run(main())
