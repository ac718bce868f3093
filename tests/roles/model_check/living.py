"""The whole life of a job under a script of faults: everybody who ends is started again, somebody does
what messages say, and in the end every batch is trained on.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import httpx

from phalanx.client import AsyncPhaseClient
from phalanx.distill import MemoryStore
from phalanx.errors import PhalanxError
from phalanx.routing.roles.snapshot import ReplicaState
from phalanx.schema.job_placement import TRAINER, PhaseSpec
from phalanx.testing.job_world import JobLayout, JobWorld, RoleShape, WorldParts
from phalanx.testing.job_world_faults import Life, ProcessEndedError, Script, WorldFault
from phalanx.testing.job_world_network import Network
from phalanx.testing.virtual_time import VirtualTimeLoop
from phalanx.wire.phases import Holding
from tests.roles.model_check.driving import (
    EXIT_S,
    SETTINGS,
    URL,
    Driver,
    Outlasting,
    SlowThreads,
    was_killed,
)

A, B = "n:0", "n:1"
SMALL = JobLayout(
    roles=(RoleShape("rollout", ((A,),)), RoleShape("teacher", ((A,),))),
    trainer=(A,),
    phases=(
        PhaseSpec("rollout", ("rollout",)),
        PhaseSpec("teacher", ("teacher",)),
        PhaseSpec("train", (TRAINER,)),
    ),
)
WIDE = JobLayout(
    roles=(
        RoleShape("rollout", ((A,), (B,))),
        RoleShape("genrm", ((A,),)),
        RoleShape("teacher", ((B,),)),
    ),
    trainer=(A, B),
    phases=(
        PhaseSpec("rollout", ("rollout",)),
        PhaseSpec("teacher", ("genrm", "teacher")),
        PhaseSpec("train", (TRAINER,)),
    ),
)
MIXED = JobLayout(
    roles=(RoleShape("rollout", ((A,),)), RoleShape("teacher", ((B,),), stays=True)),
    trainer=(A,),
    phases=SMALL.phases,
)
"""The teacher starts with its job, and whoever enters its phase waits for it."""
MAX_TRIES = 8
"""After the last fault: more are no way forward."""
LONG_S = 10_000.0
Meddling = tuple[float, str, str, dict[str, object]]
"""After so many seconds, an operator asks this of the control process: method, path and body."""


@dataclass
class Lived:
    """What came of a life."""

    world: JobWorld
    outlasting: Outlasting
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Case:
    layout: JobLayout = SMALL
    faults: Sequence[tuple[int, WorldFault]] = ()
    meddling: Sequence[Meddling] = ()
    num_steps: int = 1
    elsewhere: bool = False
    parts: WorldParts = field(default_factory=WorldParts)
    store: MemoryStore | None = None
    look: Callable[[JobWorld], None] | None = None


def live(case: Case) -> Lived:
    """All of it, in no time. `problems` are empty where everything is as it must be."""
    loop = VirtualTimeLoop()
    threads = SlowThreads()
    loop.set_default_executor(threads)
    try:
        return loop.run_until_complete(_live(case, threads))
    finally:
        # Also where a failed test has left things half done.
        while tasks := asyncio.all_tasks(loop):
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.close()


async def _live(case: Case, threads: SlowThreads) -> Lived:
    world = JobWorld(case.layout, Script(case.faults), case.parts)
    if case.look is not None:
        world.script.looks.append(partial(case.look, world))
    lived = Lived(world, Outlasting(case.store))
    keeping = asyncio.create_task(_keep_control(world))
    meddling = asyncio.create_task(_meddle(world, case.meddling))
    try:
        async with asyncio.timeout(LONG_S):
            await _train(case, world, lived.outlasting, threads)
            await meddling
            world.script.stop()
            # Whatever is still under way arrives.
            await asyncio.sleep(1000.0)
            await Operator(world).leave()
    except (TimeoutError, AssertionError, PhalanxError) as error:
        lived.problems.append(f"no way forward: {error}")
    finally:
        keeping.cancel()
        meddling.cancel()
    _check_end(case, lived)
    return lived


def _check_end(case: Case, lived: Lived) -> None:
    world, kept = lived.world, lived.outlasting
    lived.problems += world.violations
    steps = range(case.num_steps)
    if kept.published != [f"step-{step}" for step in steps] and not lived.problems:
        lived.problems.append(f"published: {kept.published}")
    if kept.saved != [step + 1 for step in steps] and not lived.problems:
        lived.problems.append(f"trained: {kept.saved}")
    left = [one for one in world.devices.resident if one.launch.role not in case.layout.staying]
    if not lived.problems and (left or world.devices.trainer_holds()):
        lived.problems.append("somebody has memory at the end")


async def _keep_control(world: JobWorld) -> None:
    """As whoever runs `phalanx up` in a loop."""
    while True:
        try:
            await world.start_control()
        except (ProcessEndedError, PhalanxError):
            world.control = None
        if world.control is not None:
            await world.control.life.wait()
        await asyncio.sleep(1.0)


async def _train(case: Case, world: JobWorld, kept: Outlasting, threads: SlowThreads) -> None:
    """Process after process, until one ends well."""
    operator, num_tries = Operator(world), 0
    driver = Driver(world, kept, threads)
    last: BaseException | None = None
    while True:
        num_tries = num_tries + 1 if world.script.ended else 0
        assert num_tries <= MAX_TRIES, last
        world.end_driver = driver.end
        try:
            await driver.run(case.num_steps, elsewhere=case.elsewhere)
            driver.end()
            return
        except (PhalanxError, ProcessEndedError, BaseExceptionGroup) as error:
            assert isinstance(error, PhalanxError) or was_killed(error), error
            last = error
        if not driver.life.is_alive or world.devices.trainer_holds(driver.pid):
            # One that does not come down by itself ends.
            driver.end()
            # Nobody but whoever starts it again knows of one elsewhere that it has ended.
            await asyncio.sleep(EXIT_S + 1.0 if case.elsewhere else 1.0)
            driver = Driver(world, kept, threads)
        await operator.help(str(last))
        await asyncio.sleep(10.0)


class Operator:
    """Does what the messages of a job that does not go on say."""

    def __init__(self, world: JobWorld) -> None:
        self._world = world
        network = Network(
            world.script,
            Life(),
            lambda: world.control,
            world.end_control,
            lambda: world.end_driver(),
            world.operations.answered,
        )
        self._client = AsyncPhaseClient(URL, settings=SETTINGS, transport=network)
        self._http = httpx.AsyncClient(base_url=URL, transport=network, verify=False)

    async def leave(self) -> None:
        await self.help()
        await self._client.leave()

    async def help(self, message: str = "") -> None:
        try:
            if "recover what is dead" in message:
                await self._replace(self._dead())
            for role, engine_id in re.findall(r"`phalanx recover (\w+)/(\w+/\d+)`", message):
                await self.ask("POST", f"/v1/roles/{role}/recover", {"engine_id": engine_id})
            for role in re.findall(r"`phalanx wake (\w+)`", message):
                await self.ask("POST", f"/v1/roles/{role}/activate", {})
            document = await self._client.phases()
            if document.blocked is not None:
                await self._recover()
            unsure = document.trainer_holding is not Holding.NOTHING
            if unsure and not self._world.devices.trainer_holds():
                await self._client.recover(["trainer"])
        except PhalanxError:
            pass

    async def _recover(self) -> None:
        try:
            await self._client.recover()
        except PhalanxError:
            await self._replace(self._unsure())
            await self._client.recover()

    async def _replace(self, engine_ids: Sequence[str]) -> None:
        for engine_id in engine_ids:
            role = engine_id.partition("/")[0]
            await self.ask("POST", f"/v1/roles/{role}/recover", {"engine_id": engine_id})

    def _dead(self) -> list[str]:
        control = self._world.control
        if control is None:
            return []
        return [
            replica.engine_id
            for manager in control.managers.values()
            for model in manager.registry.snapshot.content.models
            for replica in model.replicas
            if replica.state is ReplicaState.DEAD
        ]

    def _unsure(self) -> list[str]:
        control = self._world.control
        if control is None:
            return []
        return [
            engine_id
            for manager in control.managers.values()
            for engine_id, held in manager.residency().items()
            if held is None
        ]

    async def ask(self, method: str, path: str, body: dict[str, object]) -> int | None:
        """The status; None where nobody answered."""
        try:
            answer = await self._http.request(method, path, json=body if body else None)
        except httpx.TransportError:
            return None
        return answer.status_code


async def _meddle(world: JobWorld, meddling: Sequence[Meddling]) -> None:
    operator = Operator(world)
    asking = []
    for after_s, method, path, body in meddling:
        await asyncio.sleep(after_s)
        asking.append(asyncio.create_task(_asked(world, operator, method, path, body)))
    for task in asking:
        await asyncio.wait([task], timeout=1000.0)
        task.cancel()


async def _asked(
    world: JobWorld, operator: Operator, method: str, path: str, body: dict[str, object]
) -> None:
    status = await operator.ask(method, path, body)
    moves = path.rpartition("/")[2] in ("activate", "deactivate", "drain")
    if moves and path.split("/")[3] not in world.layout.staying and status not in (409, None):
        world.note(f"{path} was answered with {status}: only phases move a role that takes turns")
