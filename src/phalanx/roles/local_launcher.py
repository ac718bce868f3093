"""Starts replicas as processes of this machine, each with a session, a port and a log of its own.

None of them outlives the process that started it, or the thread in which the launcher is used.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path

from phalanx.errors import ConfigurationError
from phalanx.roles.child_process import ChildProcess, ProcessHost
from phalanx.roles.contracts import ReplicaLaunch
from phalanx.roles.engine_command import (
    BOOTSTRAP_PORT,
    EnginePrograms,
    ListenAddress,
    engine_command,
)
from phalanx.roles.ports import ReservedPort
from phalanx.roles.replica_devices import SimulatedCluster
from phalanx.schema.roles import WorkerType

CLOSE_GRACE_S = 10.0


@dataclass(frozen=True)
class LocalLauncherSettings:
    """`log_dir` gets a file a start: ROLE/MODEL/ORDINAL.GENERATION.log.

    Replicas listen at `host`, on any free ports or (`first_port`) on the first free ones from there.
    `simulated` are the devices of the job, and None real ones, or none. `living`: see `ProcessHost`.
    """

    log_dir: Path
    host: str = "127.0.0.1"
    first_port: int | None = None
    programs: EnginePrograms = field(default_factory=EnginePrograms)
    simulated: SimulatedCluster | None = None
    living: int | None = None


class LocalReplica:
    """One replica: a process and whatever it starts itself."""

    def __init__(self, address: ListenAddress, child: ChildProcess) -> None:
        self._address = address
        self._child = child

    @property
    def url(self) -> str:
        return self._address.url

    @property
    def bootstrap_port(self) -> int | None:
        return self._address.bootstrap_port

    @property
    def pid(self) -> int:
        """Of the process that was started, which leads the session of all of them."""
        return self._child.pid

    @property
    def log_file(self) -> Path:
        return self._child.log_file

    async def exited(self) -> str:
        """Wait until it has ended by itself; how, and the end of its log."""
        return await self._child.exited()

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, after `grace_s` SIGKILL; every process of it is gone on return."""
        await self._child.stop(grace_s)


class LocalLauncher:
    """Made, used and closed in one event loop.

    `settings.programs` says what is run for each kind of engine. The command and the environment of
    a replica follow from its own specification: of this process's environment it gets only what
    describes the machine (see `settings.machine_environment`).
    """

    def __init__(self, settings: LocalLauncherSettings) -> None:
        self._settings = settings
        self._host = ProcessHost(settings.living)

    async def launch(self, launch: ReplicaLaunch) -> LocalReplica:
        """Start it and return at once. Raises `ConfigurationError` for what can never start."""
        with contextlib.ExitStack() as undo:
            ports = undo.enter_context(contextlib.ExitStack())
            address = reserved_address(
                launch, self._settings.host, self._settings.first_port, ports
            )
            settings = self._settings
            command = engine_command(launch, address, settings.programs, settings.simulated)
            log_file = replica_log(
                self._settings.log_dir, launch.role, launch.engine_id, launch.generation
            )
            child = self._host.start(command, log_file, holds=ports)
            undo.pop_all()
        return LocalReplica(address, child)

    async def close(self, grace_s: float = CLOSE_GRACE_S) -> None:
        """Stop whatever still runs. Any number of times, also again with less patience."""
        await self._host.close(grace_s)


def reserved_address(
    launch: ReplicaLaunch, host: str, first: int | None, ports: contextlib.ExitStack
) -> ListenAddress:
    """Where a replica is to listen on this machine, at ports that are taken until `ports` ends: any
    free ones, or the first free ones from `first` on.
    """
    port = ports.enter_context(ReservedPort(host, first=first))
    bootstrap = None
    if launch.group.worker_type is WorkerType.PREFILL:
        wanted = launch.extra_args.get(BOOTSTRAP_PORT)
        if wanted is not None and not isinstance(wanted, int):
            raise ConfigurationError(f"{BOOTSTRAP_PORT}={wanted!r} must be a number")
        given = first if wanted is None else wanted
        bootstrap = ports.enter_context(ReservedPort(host, first=given)).number
    return ListenAddress(host, port.number, bootstrap)


def replica_log(log_dir: Path, role: str, engine_id: str, generation: int) -> Path:
    """Where a replica logs that was started here."""
    return log_dir / role / f"{engine_id}.{generation}.log"
