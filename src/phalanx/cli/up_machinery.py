"""What starts the processes of a job: on this machine, or on a Ray cluster."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from phalanx.cli.up_plan import engine_programs
from phalanx.roles.child_process import ProcessHost
from phalanx.roles.config import JobConfig
from phalanx.roles.contracts import Backends, EngineControl, Launcher, PlacementGroup
from phalanx.roles.control_process import JobPlace, Machinery
from phalanx.roles.device_view import DeviceView
from phalanx.roles.external_pool import ExternalPool, LauncherByKind
from phalanx.roles.job_sections import LauncherKind
from phalanx.roles.local_launcher import LocalLauncher, LocalLauncherSettings
from phalanx.roles.replica_devices import SimulatedCluster
from phalanx.roles.router_process import RouterSettings, RouterStarter
from phalanx.roles.sglang_engine import EngineTimeouts, SGLangEngine
from phalanx.schema.roles import InferenceRoleSpec

GroupsOf = Callable[[str], Sequence[PlacementGroup]]


@contextlib.asynccontextmanager
async def machinery(job: JobConfig, place: JobPlace) -> AsyncIterator[Machinery]:
    """For as long as the job runs. On a cluster its devices are reserved and checked by then."""
    given, logs, programs = job.launcher, place.log_directory, engine_programs(job)
    if given.kind is LauncherKind.LOCAL:
        simulated = SimulatedCluster.of(job.plan, place.file.devices)
        if simulated is not None:
            simulated.make()
        local = LocalLauncher(
            LocalLauncherSettings(
                logs, given.host, given.first_port, programs, simulated, place.file.living
            )
        )
        made = _machinery(job, place, local, lambda: local.close(0.0))
        yield dataclasses.replace(made, devices=DeviceView(job.plan, simulated))
        return
    # Ray is an optional package, and slow to import.
    from phalanx.roles.ray_cluster.job import RayJob

    ray_job = await RayJob.open(place.name, given, job.plan, programs, logs)
    try:
        launcher = ray_job.launcher
        made = _machinery(
            job,
            place,
            launcher,
            lambda: launcher.close(0.0),
            ray_job.groups_of,
            ray_job.shared_groups,
        )
        told = DeviceView(
            job.plan, of_trainer=ray_job.trainer_environment, elsewhere=ray_job.devices
        )
        yield dataclasses.replace(made, devices=told)
    finally:
        ray_job.close()


def _machinery(
    job: JobConfig,
    place: JobPlace,
    started: Launcher,
    kill: Callable[[], Awaitable[None]],
    groups_of: GroupsOf = lambda role: (),
    shared_groups: Sequence[PlacementGroup] = (),
) -> Machinery:
    launcher = LauncherByKind(started, ExternalPool())
    python = job.launcher.router_python or sys.executable

    def backends(role: InferenceRoleSpec) -> Backends:
        routers = RouterSettings(place.log_directory, python=python, policy=role.routing.policy)
        timeouts = EngineTimeouts.of(role.deployment)

        def connect(url: str) -> EngineControl:
            return SGLangEngine(url, timeouts=timeouts)

        opener = RouterStarter(routers).open
        return Backends(launcher, connect, opener, tuple(groups_of(role.role)))

    return Machinery(ProcessHost(), launcher, backends, kill, placement_groups=tuple(shared_groups))
