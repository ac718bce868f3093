"""What runs on the machines of a cluster: one actor for each machine of a replica, which starts the
process there as a local launcher does, and whose end is that of the process.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path

from phalanx.device_ledger import DeviceLedger
from phalanx.errors import PhalanxError
from phalanx.roles import lifeline
from phalanx.roles.child_process import ChildProcess, Command, ProcessHost
from phalanx.roles.contracts import ReplicaLaunch
from phalanx.roles.engine_command import EnginePrograms, EngineSpan, ListenAddress, engine_command
from phalanx.roles.local_launcher import replica_log, reserved_address
from phalanx.roles.ports import ReservedPort
from phalanx.settings import SimulatedDevices

_SET_BY_RAY = "OMP_NUM_THREADS"
"""For the actors that it runs, whatever the machine says."""


@dataclass(frozen=True)
class HostSettings:
    """The same on every machine: what is run for each kind of engine, and where its log goes."""

    log_dir: str
    programs: EnginePrograms
    first_port: int | None = None


@dataclass(frozen=True)
class Ledger:
    """The simulated devices of one machine: the file of their ledger there, how many they are, and
    how large each is.
    """

    file: str
    num_devices: int
    device_bytes: int


@dataclass(frozen=True)
class Order:
    """What one machine is to start: its part of a replica, on these devices of it."""

    launch: ReplicaLaunch
    devices: tuple[int, ...]
    ledger: Ledger | None = None
    span: EngineSpan | None = None


@dataclass(frozen=True)
class Reserved:
    """Where the head's machine has kept ports: for requests, and for the other machines."""

    address: ListenAddress
    meeting: str


@dataclass(frozen=True)
class Refused:
    """Why nothing was started. Errors of ours are told as values: Ray would wrap them."""

    reason: str


class EngineHost:
    """An actor of Ray, asynchronous. It is killed when its process has ended for certain."""

    def __init__(self, settings: HostSettings, address: str) -> None:
        """`address` is that of its machine."""
        self._settings = settings
        self._address = address
        self._ports = contextlib.ExitStack()
        self._reserved: Reserved | None = None
        self._host = ProcessHost()
        self._child: ChildProcess | None = None

    async def ping(self) -> None:
        """Answers while it lives."""

    async def reserve(self, launch: ReplicaLaunch) -> Reserved | Refused:
        """Take the ports that the replica listens at."""
        first = self._settings.first_port
        try:
            address = reserved_address(launch, self._address, first, self._ports)
            meeting = self._ports.enter_context(ReservedPort(self._address, first=first))
        except (PhalanxError, OSError) as error:
            return Refused(f"on {self._address}: {error}")
        self._reserved = Reserved(address, f"{_bracketed(self._address)}:{meeting.number}")
        return self._reserved

    async def start(self, order: Order, address: ListenAddress) -> int | Refused:
        """Start the process, which listens at `address` if it is the head; its number."""
        try:
            child = self._start(order, address)
        except (PhalanxError, OSError) as error:
            return Refused(f"on {self._address}: {error}")
        self._child = child
        return child.pid

    async def exited(self) -> str:
        """Wait until the process has ended by itself: how, and the end of its log."""
        assert self._child is not None
        return f"on {self._address}: {await self._child.exited()}"

    async def stop(self, grace_s: float) -> None:
        """Returns when no process is left."""
        await self._host.close(grace_s)
        self._ports.close()

    def _start(self, order: Order, address: ListenAddress) -> ChildProcess:
        launch = order.launch
        # The devices are this machine's, and not those that were planned.
        bare = replace(launch, group=replace(launch.group, placement=None))
        command = engine_command(bare, address, self._settings.programs, span=order.span)
        owner = f"{launch.role}/{launch.engine_id}"
        devices = told_devices(order.devices, order.ledger, owner)
        environment = {**command.environment, **devices}
        if _SET_BY_RAY not in launch.model.env_vars:
            environment.pop(_SET_BY_RAY, None)
        log_dir = Path(self._settings.log_dir)
        file = replica_log(log_dir, launch.role, launch.engine_id, launch.generation)
        if order.span is not None and order.span.node_rank > 0:
            file = file.with_suffix(f".node{order.span.node_rank}.log")
        command = Command(command.arguments, environment)
        return self._host.start(command, file, holds=self._ports.pop_all())


def is_over(session: int) -> bool:
    """Whether nothing runs any more on this machine of a process that was started, and of its own."""
    return not lifeline.members(session)


def make_ledger(ledger: Ledger) -> str:
    """Make the ledger of this machine; what is wrong, or nothing."""
    path = Path(ledger.file)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        DeviceLedger.create(path, ledger.num_devices, ledger.device_bytes)
    except (PhalanxError, OSError) as error:
        return str(error)
    return ""


def told_devices(devices: tuple[int, ...], ledger: Ledger | None, owner: str) -> dict[str, str]:
    """What a process on a machine is told of its devices there, as `replica_devices` says it."""
    if ledger is None:
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices))}
    simulated = SimulatedDevices(Path(ledger.file), devices, owner)
    return {"PHALANX_DEVICE": "cpu", **simulated.variable()}


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address
