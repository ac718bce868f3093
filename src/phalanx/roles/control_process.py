"""One job: the managers of its roles, the control door and the gateway's process, in one event loop.

Whatever ends it, and at whatever stage, nothing that it started runs on.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from phalanx.clock import Clock
from phalanx.roles.child_process import ProcessHost, last_lines
from phalanx.roles.config import JobConfig
from phalanx.roles.contracts import Backends, Launcher, PlacementGroup
from phalanx.roles.control_app import ControlApi
from phalanx.roles.control_door import ControlDoor
from phalanx.roles.control_messages import Job, JobStage, RoleStatus
from phalanx.roles.coordination.coordinator import LifecycleCoordinator
from phalanx.roles.coordination.journal import FileJournal
from phalanx.roles.coordination.leased import leased
from phalanx.roles.coordination.schedule import schedule_of
from phalanx.roles.coordination.tenants import RoleTenant
from phalanx.roles.coordination.trainer import SystemProcesses
from phalanx.roles.device_view import DeviceView
from phalanx.roles.events import EventKind, EventLog
from phalanx.roles.gateway_process import PROGRAM, GatewayLaunch, GatewayProcess
from phalanx.roles.local_launcher import replica_log
from phalanx.roles.manager import InferenceManager
from phalanx.roles.progress import Progress, UnpublishedReplica
from phalanx.roles.publication import initial_content
from phalanx.roles.run_file import RunFile, RunRecord
from phalanx.roles.together import all_or_first_error, all_to_their_ends, raise_failures
from phalanx.routing.roles.documents import internal
from phalanx.routing.roles.registry import RoleRegistry
from phalanx.schema.roles import InferenceRoleSpec

logger = logging.getLogger(__name__)
STOP_GRACE_S = 10.0


@dataclass(frozen=True)
class JobPlace:
    """What a job is called, where it is written down, which file it is of, and where it logs."""

    name: str
    file: RunFile
    config: str
    log_directory: Path


@dataclass(frozen=True)
class Machinery:
    """What starts processes: replicas through `launcher`, which each role's `backends` use, and the
    gateway through `host`. `kill` ends the processes of replicas at once. `placement_groups` are
    shared by several roles, and deleted when all of these have ended. `devices` tell what is held
    of simulated ones.
    """

    host: ProcessHost
    launcher: Launcher
    backends: Callable[[InferenceRoleSpec], Backends]
    kill: Callable[[], Awaitable[None]]
    gateway_program: tuple[str, ...] = PROGRAM
    placement_groups: tuple[PlacementGroup, ...] = ()
    devices: DeviceView = field(default_factory=DeviceView)


class ControlProcess:
    """Made in a running event loop. `start`, `wait`, then `close`, which may come at any time."""

    def __init__(self, job: JobConfig, place: JobPlace, machinery: Machinery, clock: Clock) -> None:
        """Raises `ConfigurationError` where an address is taken, or the journal of the job's phases
        is that of another job; then nothing is left behind.
        """
        self._place = place
        self._machinery = machinery
        self._clock = clock
        self._epoch = secrets.token_hex(8)
        self._started_wall_s = clock.wall_s()
        self._stage = JobStage.STARTING
        self._end = asyncio.Event()
        self._hurry = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.events = EventLog(clock)
        self._progress = Progress(self.events)
        self._managers = {
            spec.role: InferenceManager(
                spec,
                leased(machinery.backends(spec), spec.role, self._check_lease),
                RoleRegistry(spec.role, self._epoch, initial_content(spec)),
                clock,
                self.events,
            )
            for spec in job.roles
        }
        self._door = ControlDoor(job.control.port)
        self._key = job.control.key
        with contextlib.ExitStack() as undo:
            undo.callback(self._door.abandon)
            self._coordinator = LifecycleCoordinator(
                schedule_of(job.plan, job.roles),
                {name: RoleTenant(manager) for name, manager in self._managers.items()},
                FileJournal(place.file.journal),
                SystemProcesses(),
                clock,
                self.events,
            )
            undo.callback(self._coordinator.abandon)
            self._api = ControlApi(
                self._managers,
                self._coordinator,
                self.events,
                epoch=self._epoch,
                describe=self._described,
                stop=self.stop,
                key=self._key,
            )
            self._gateway = GatewayProcess(self._gateway_launch(job), machinery.host, self._say)
            undo.pop_all()

    @property
    def gateway_url(self) -> str:
        return self._gateway.url

    @property
    def control_url(self) -> str:
        return self._door.url

    def manager(self, role: str) -> InferenceManager:
        """That of a role, which has to exist."""
        return self._managers[role]

    def describe(self) -> Job:
        """The job at this moment."""
        return Job(
            name=self._place.name,
            epoch=self._epoch,
            stage=self._stage,
            pid=os.getpid(),
            started_wall_s=self._started_wall_s,
            control_url=self._door.url,
            gateway_url=self._gateway.url,
            gateway_up=self._gateway.up,
            log_directory=str(self._place.log_directory),
            last_event=self.events.last_number,
            phases=self._coordinator.document,
            devices=self._machinery.devices.status(),
            trainer_environment=self._machinery.devices.trainer_environment(),
            roles=tuple(self._status(manager) for manager in self._managers.values()),
        )

    async def _described(self) -> Job:
        """With the devices of other machines, which are asked for it."""
        devices = await self._machinery.devices.everywhere()
        return msgspec.structs.replace(self.describe(), devices=devices)

    async def start(self) -> None:
        """The control door, then the gateway, then every role; raises what keeps one from starting."""
        self._door.open(self._api.app())
        await self._gateway.start()
        self._tasks.append(asyncio.create_task(self._gateway.run()))
        self._say(f"the gateway is at {self._gateway.url}")
        self._place.file.write(self._record())
        await all_or_first_error(manager.start() for manager in self._managers.values())
        self._stage = JobStage.RUNNING
        self._say("every role has started")

    def stop(self, now: bool = False) -> None:
        """Let `wait` return, once however often; `now`: do not wait for running requests."""
        if now:
            self._hurry.set()
        self._end.set()

    def interrupt(self) -> None:
        """A signal: `stop`, and `now` where it stops already."""
        self.stop(now=self._end.is_set())

    async def wait(self) -> None:
        """Until `stop` is called. Raises where a part of this has failed; none should."""
        ended = asyncio.create_task(self._end.wait())
        try:
            await asyncio.wait((ended, *self._tasks), return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
        for task in self._tasks:
            if task.done():
                task.result()

    async def close(self) -> None:
        """Drain and stop every role, then the gateway. Every step of it is done whatever fails."""
        self._stage = JobStage.STOPPING
        if not self._hurry.is_set():
            self._say("stopping: running requests end first")
        async with contextlib.AsyncExitStack() as steps:
            await steps.enter_async_context(self._hurried())
            steps.push_async_callback(self._machinery.host.close, STOP_GRACE_S)
            for group in self._machinery.placement_groups:
                steps.push_async_callback(group.delete)
            steps.push_async_callback(self._machinery.launcher.close)
            steps.push_async_callback(self._door.close)
            steps.callback(self._api.close)
            steps.push_async_callback(self._coordinator.close)
            steps.push_async_callback(self._gateway.stop)
            steps.push_async_callback(self._end_tasks)
            # What it does is ended here; what it has begun, by the managers.
            await self._coordinator.end()
            managers = self._managers.values()
            raise_failures(
                "the job did not stop as it should",
                await all_to_their_ends(manager.shutdown() for manager in managers),
            )

    @contextlib.asynccontextmanager
    async def _hurried(self) -> AsyncIterator[None]:
        """A `stop` that does not wait ends every process at once while this is open."""
        killing = asyncio.create_task(self._kill())
        try:
            yield
        finally:
            killing.cancel()
            await asyncio.gather(killing, return_exceptions=True)

    async def _kill(self) -> None:
        await self._hurry.wait()
        self._say("stopping at once")
        # First: a killed engine looks like one that is slow to answer.
        for manager in self._managers.values():
            manager.hurry("its job stops at once")
        await asyncio.gather(self._gateway.stop(hurry=True), self._machinery.kill())

    async def _end_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _gateway_launch(self, job: JobConfig) -> GatewayLaunch:
        return GatewayLaunch(
            section=job.gateway,
            control_url=self._door.url,
            control_key=job.control.key,
            key_file=self._place.file.keys,
            log_file=self._place.log_directory / "gateway.log",
            log_level=job.log.level,
            program=self._machinery.gateway_program,
        )

    def _check_lease(self, role: str) -> None:
        self._coordinator.check_lease(role)

    def _status(self, manager: InferenceManager) -> RoleStatus:
        document = internal(manager.registry.snapshot)
        known = [engine for model in document.models.values() for engine in model.engines]
        residency = manager.residency()
        return RoleStatus(
            document=document,
            residency={
                engine: None if tags is None else tuple(sorted(tags))
                for engine, tags in residency.items()
            },
            unpublished=tuple(
                self._with_its_word(manager.spec.role, each)
                for each in self._progress.of(manager.spec.role, known)
            ),
        )

    def _with_its_word(self, role: str, replica: UnpublishedReplica) -> UnpublishedReplica:
        """With the last that it has logged, where nothing else is known of what it does."""
        if replica.detail:
            return replica
        file = replica_log(self._place.log_directory, role, replica.engine_id, replica.generation)
        return dataclasses.replace(replica, detail="".join(last_lines(file, count=1)))

    def _record(self) -> RunRecord:
        return RunRecord(
            name=self._place.name,
            pid=os.getpid(),
            control_url=self._door.url,
            gateway_url=self._gateway.url,
            config=self._place.config,
            log_directory=str(self._place.log_directory),
            started_wall_s=self._started_wall_s,
            key=self._key,
        )

    def _say(self, words: str) -> None:
        logger.info("%s", words)
        self.events.add("", EventKind.OPERATION, detail=words)
