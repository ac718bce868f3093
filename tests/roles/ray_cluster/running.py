"""Plans bound to a cluster for a while, launchers on them, and what is there."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

from ray._private.state import actors
from ray.util.placement_group import placement_group_table

from phalanx.roles.calls import PollPause
from phalanx.roles.engine_command import EnginePrograms
from phalanx.roles.ray_cluster.binder import BoundPlacement, RayBinder
from phalanx.roles.ray_cluster.cluster import RayCluster
from phalanx.roles.ray_cluster.host import HostSettings
from phalanx.roles.ray_cluster.launcher import EXTRA_S, RayLauncher
from phalanx.roles.ray_cluster.replica import RayReplica
from phalanx.roles.sglang_engine import SGLangEngine
from phalanx.schema.job_placement import PlacementPlan
from phalanx.schema.roles import EngineGroupSpec, EngineKind

SERVER = EnginePrograms(sglang=(sys.executable, "-m", "phalanx.testing.sglang_server"))
TELLS = """
import json, os, signal, sys
print(json.dumps([sys.argv[1:], dict(os.environ)]), flush=True)
signal.pause()
"""
TELLING = EnginePrograms(sglang=(sys.executable, "-c", TELLS))


def sglang(**fields: object) -> EngineGroupSpec:
    return EngineGroupSpec(engine=EngineKind.SGLANG, **fields)


def groups_there() -> set[str]:
    return {
        group["name"] for group in placement_group_table().values() if group["state"] != "REMOVED"
    }


def actors_there() -> set[str]:
    return {name for name, actor in actors().items() if actor["State"] != "DEAD"}


@asynccontextmanager
async def bound(cluster: RayCluster, plan: PlacementPlan) -> AsyncIterator[BoundPlacement]:
    made = await RayBinder(cluster, "job", 30.0).bind(plan)
    try:
        yield made
    finally:
        await made.delete()
        await all_free(cluster)


@asynccontextmanager
async def launching(
    cluster: RayCluster,
    made: BoundPlacement | None,
    logs: Path,
    programs: EnginePrograms = SERVER,
    extra_s: float = EXTRA_S,
) -> AsyncIterator[RayLauncher]:
    settings = HostSettings(str(logs), programs)
    launcher = RayLauncher(cluster, made, settings, "job", extra_s=extra_s)
    try:
        yield launcher
    finally:
        await launcher.close(0.0)


async def all_free(cluster: RayCluster) -> None:
    for machine in cluster.machines():
        await have_free(cluster, machine.address, machine.num_devices)


async def have_free(cluster: RayCluster, address: str, count: int) -> None:
    """Ray says late, and only when it is asked, what it has taken back."""
    pause = PollPause()
    while all(each.free < count for each in cluster.machines() if each.address == address):
        await pause.rest()


async def healthy(replica: RayReplica) -> None:
    exited = asyncio.ensure_future(replica.exited())
    async with SGLangEngine(replica.url) as engine:
        while not await engine.healthy():
            assert not exited.done(), exited.result()
            await asyncio.sleep(0.02)
    exited.cancel()


def pids(replicas: Iterable[RayReplica]) -> list[int]:
    return [part.pid for replica in replicas for part in replica.parts if part.pid is not None]
