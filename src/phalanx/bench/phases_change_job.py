"""A job whose roles take turns, with a real coordinator, managers, journal and control door; its
engines are objects of this process that take a given time for their memory, and none for the rest.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from phalanx.client.phases_async import AsyncPhaseClient
from phalanx.clock import SystemClock
from phalanx.errors import PhalanxError
from phalanx.roles.contracts import ALL_TAGS, Backends, ModelRouter, ReplicaLaunch, Tag
from phalanx.roles.control_app import ControlApi
from phalanx.roles.control_door import ControlDoor
from phalanx.roles.control_messages import Job
from phalanx.roles.coordination.coordinator import LifecycleCoordinator
from phalanx.roles.coordination.journal import FileJournal
from phalanx.roles.coordination.leased import leased
from phalanx.roles.coordination.schedule import schedule_of
from phalanx.roles.coordination.tenants import RoleTenant
from phalanx.roles.coordination.trainer import SystemProcesses
from phalanx.roles.events import EventLog
from phalanx.roles.manager import InferenceManager
from phalanx.roles.placement.planner import plan
from phalanx.roles.publication import initial_content
from phalanx.routing.roles.registry import RoleRegistry
from phalanx.schema.job_placement import ClusterSpec, NodeSpec, PhaseSpec, PlacementRequest
from phalanx.schema.roles import (
    DeploymentSpec,
    EngineGroupSpec,
    InferenceModelSpec,
    InferenceRoleSpec,
    PlacementMode,
    RoutingSpec,
    WorkloadType,
)
from phalanx.wire.discovery import decode_internal

FIRST, SECOND = "first", "second"
_EPOCH = "benchmark"
_HEALTH_S = 3600.0


class StandIn:
    """An engine that is ready at once, and its process. `own_s`: what it has taken for its memory."""

    def __init__(self, url: str, load_s: float) -> None:
        self.url = url
        self.bootstrap_port: int | None = None
        self.own_s = 0.0
        self._load_s = load_s
        self._held = ALL_TAGS
        self._ended = asyncio.Event()

    async def exited(self) -> str:
        await self._ended.wait()
        return "it was stopped"

    async def stop(self, grace_s: float) -> None:
        """It is gone at once."""

    async def healthy(self) -> bool:
        return True

    async def ready(self) -> bool:
        return True

    async def pause(self) -> None:
        """Nothing runs."""

    async def go_on(self) -> None:
        """Nothing runs."""

    async def abort_all(self) -> None:
        """Nothing runs."""

    async def is_idle(self) -> bool:
        return True

    async def num_requests(self) -> int | None:
        return 0

    async def release(self, tags: frozenset[Tag]) -> None:
        await self._work()
        self._held -= tags

    async def resume(self, tags: frozenset[Tag]) -> None:
        await self._work()
        self._held |= tags

    async def resident(self) -> frozenset[Tag] | None:
        return self._held

    async def weight_version(self) -> str:
        return "default"

    async def waits_for_weights(self) -> bool | None:
        return False

    async def load_weights(self, path: str, version: str) -> None:
        raise PhalanxError("its weights never change")

    async def close(self) -> None:
        """Nothing is open."""

    async def _work(self) -> None:
        begun_s = time.perf_counter()
        await asyncio.sleep(self._load_s)
        self.own_s += time.perf_counter() - begun_s


class StandIns:
    """Starts them, and knows them by their addresses."""

    def __init__(self, load_s: float) -> None:
        self._load_s = load_s
        self._engines: dict[str, StandIn] = {}

    @property
    def backends(self) -> Backends:
        return Backends(self, self.connect, self._open_router)

    def take_own_s(self) -> float:
        """What the slowest of those that gave memory back and the slowest of those that took it have
        taken since this was last asked: what a change cannot be faster than.
        """
        own_s = {url.rpartition("/")[2]: engine.own_s for url, engine in self._engines.items()}
        for engine in self._engines.values():
            engine.own_s = 0.0
        halves = [
            max((taken for url, taken in own_s.items() if url.startswith(half)), default=0.0)
            for half in (FIRST, SECOND)
        ]
        return sum(halves)

    async def launch(self, launch: ReplicaLaunch) -> StandIn:
        url = f"http://stand-in/{launch.role}-{launch.ordinal}"
        self._engines[url] = StandIn(url, self._load_s)
        return self._engines[url]

    def connect(self, url: str) -> StandIn:
        return self._engines[url]

    async def close(self) -> None:
        """Nothing runs."""

    async def _open_router(self, role: str, model: InferenceModelSpec) -> ModelRouter:
        raise PhalanxError(f"{role}/{model.name} has no router")


class TurnsJob:
    """Asked through its control door, as a training loop does."""

    def __init__(self, client: AsyncPhaseClient, engines: StandIns) -> None:
        self._client = client
        self._engines = engines
        self._batch = 0
        self._phase = SECOND

    async def change(self) -> tuple[float, float]:
        """To the other phase: seconds from asking to the answer, and those that were the engines'."""
        self._engines.take_own_s()
        self._phase = FIRST if self._phase == SECOND else SECOND
        self._batch += self._phase == FIRST
        begun_s = time.perf_counter()
        await self._client.enter(self._phase, str(self._batch))
        return time.perf_counter() - begun_s, self._engines.take_own_s()


@asynccontextmanager
async def turns_job(
    num_roles: int, num_replicas: int, load_s: float, folder: Path
) -> AsyncIterator[TurnsJob]:
    """One that runs, each role of it followed from outside as a gateway does. `folder` gets its
    journal.
    """
    clock, engines = SystemClock(), StandIns(load_s)
    events = EventLog(clock)
    planned = plan(_request(num_roles, num_replicas))

    def check_lease(role: str) -> None:
        coordinator.check_lease(role)

    managers = {
        spec.role: InferenceManager(
            spec,
            leased(engines.backends, spec.role, check_lease),
            RoleRegistry(spec.role, _EPOCH, initial_content(spec)),
            clock,
            events,
        )
        for spec in planned.roles
    }
    coordinator = LifecycleCoordinator(
        schedule_of(planned, planned.roles),
        {name: RoleTenant(manager) for name, manager in managers.items()},
        FileJournal(folder / "job.journal"),
        SystemProcesses(),
        clock,
        events,
    )

    async def describe() -> Job:
        raise PhalanxError("it is not a whole job")

    def stop(now: bool) -> None:
        """It ends with its block."""

    api = ControlApi(managers, coordinator, events, epoch=_EPOCH, describe=describe, stop=stop)
    async with AsyncExitStack() as stack:
        door = ControlDoor(0)
        stack.push_async_callback(door.close)
        door.open(api.app())
        stack.callback(api.close)
        stack.push_async_callback(coordinator.close)
        client = await stack.enter_async_context(AsyncPhaseClient(door.url))
        followers = [asyncio.create_task(_follow(door.url, role)) for role in managers]
        stack.push_async_callback(_end, followers)
        yield TurnsJob(client, engines)
        for manager in managers.values():
            await manager.shutdown(0.0)


def _request(num_roles: int, num_replicas: int) -> PlacementRequest:
    deployment = DeploymentSpec(health_interval_s=_HEALTH_S)
    half = num_roles // 2
    names = [f"{FIRST if number < half else SECOND}-{number}" for number in range(num_roles)]
    roles = tuple(
        InferenceRoleSpec(
            name,
            WorkloadType.ROLLOUT,
            deployment,
            RoutingSpec(),
            (InferenceModelSpec("m", "m", (EngineGroupSpec(num_replicas),)),),
        )
        for name in names
    )
    return PlacementRequest(
        PlacementMode.DEFER,
        ClusterSpec((NodeSpec("node-0", half * num_replicas),)),
        roles,
        phases=(PhaseSpec(FIRST, tuple(names[:half])), PhaseSpec(SECOND, tuple(names[half:]))),
    )


async def _follow(control_url: str, role: str) -> None:
    """As a gateway does, and at little cost: it runs in the process that is measured."""
    host, _, port = control_url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    seen = ""
    try:
        while True:
            path = f"/v1/roles/{role}?follower=bench&wait_s=20{seen}"
            writer.write(f"GET {path} HTTP/1.1\r\nhost: {host}\r\n\r\n".encode())
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            size = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
            revision = decode_internal(await reader.readexactly(size)).topology_revision
            seen = f"&epoch={_EPOCH}&after={revision}"
    finally:
        writer.close()


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
