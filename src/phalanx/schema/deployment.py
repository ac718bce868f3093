"""Where an engine's replicas run and how their workers are looked after: frozen, checked values.

How one replica is cut over ranks is not said here but in `ParallelConfig`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from phalanx import settings
from phalanx.errors import ConfigurationError, WrongTypeError

MODES = ("auto", "local", "external")
MAX_PORT = 65535
RESERVED_ENV = (
    "PYTHONPATH",
    "PYTHONHOME",
    "CUDA_VISIBLE_DEVICES",
    "MASTER_ADDR",
    "MASTER_PORT",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "PHALANX_DEVICE",
    *(settings.PREFIX + name for name in settings.REMOVED),
)
"""Variables that say where a worker runs and what it imports; the engine alone sets them."""


@dataclass(frozen=True)
class WorkerSupervisorConfig:
    """How a supervisor starts, times and stops the workers of local replicas.

    The ranks of replica `r` meet at `master_addr`, port `base_port + r`. A replica that spans
    `num_nodes` machines has an engine on the first (`node_rank` 0), where all machines meet at
    `base_port`, and a follower on each of the others.

    All workers must be ready within `startup_timeout_s`; a stop waits `shutdown_timeout_s` for them
    before it kills them. A request that has not ended `execution_timeout_s` after its submit,
    queueing included, fails the engine (None: it may take for ever). `extra_env` are (name, value)
    pairs set in each worker.
    """

    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    base_port: int = 29500
    startup_timeout_s: float = 600.0
    shutdown_timeout_s: float = 10.0
    execution_timeout_s: float | None = None
    extra_env: tuple[tuple[str, str], ...] = ()
    num_nodes: int = 1

    def __post_init__(self) -> None:
        _integer("node_rank", self.node_rank, 0)
        _integer("num_nodes", self.num_nodes, 1)
        if not isinstance(self.master_addr, str) or not self.master_addr.strip():
            raise ConfigurationError(
                f"master_addr={self.master_addr!r} must be an address, such as 127.0.0.1"
            )
        _integer("base_port", self.base_port, 1, MAX_PORT)
        _seconds("startup_timeout_s", self.startup_timeout_s)
        _seconds("shutdown_timeout_s", self.shutdown_timeout_s)
        if self.execution_timeout_s is not None:
            _seconds("execution_timeout_s", self.execution_timeout_s, or_else=", or None for none")
        object.__setattr__(self, "extra_env", _environment(self.extra_env))


@dataclass(frozen=True)
class DeploymentConfig:
    """How many replicas an engine has, and where they run.

    `mode` `auto` runs a single rank of a single replica in the calling process, and everything
    else, also a single rank with explicit `devices`, in local workers; `external` takes the calling
    process as one rank that a launcher such as torchrun made. `devices` are indices into the
    devices that this process sees, for replica 0 first; without any, all are taken in order.
    `output_rank` is the rank of a replica that answers. Without `auto_start` workers start with the
    first request or with `setup()`.
    """

    mode: str = "auto"
    replica_count: int = 1
    devices: tuple[int, ...] = ()
    output_rank: int = 0
    process_config: WorkerSupervisorConfig | None = None
    auto_start: bool = True

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigurationError(
                f"mode={self.mode!r} is not known; allowed: {', '.join(MODES)}"
            )
        _integer("replica_count", self.replica_count, 1)
        object.__setattr__(self, "devices", normalize_device_indices(self.devices))
        _integer("output_rank", self.output_rank, 0)
        if not isinstance(self.auto_start, bool):
            raise ConfigurationError(f"auto_start={self.auto_start!r} must be True or False")
        process = self.process_config
        if process is not None and not isinstance(process, WorkerSupervisorConfig):
            raise WrongTypeError(
                "process_config must be a phalanx.server.WorkerSupervisorConfig or None, not "
                f"{type(process).__name__} {process!r}"
            )
        if self.mode == "external":
            self._check_external()
        else:
            self._check_local()

    @classmethod
    def local(
        cls,
        devices: Sequence[int | str] = (),
        *,
        replica_count: int = 1,
        process_config: WorkerSupervisorConfig | None = None,
        output_rank: int = 0,
        auto_start: bool = True,
    ) -> Self:
        """Every rank of every replica in a worker process of its own on this machine."""
        return cls(
            mode="local",
            replica_count=replica_count,
            devices=normalize_device_indices(devices),
            output_rank=output_rank,
            process_config=process_config,
            auto_start=auto_start,
        )

    @classmethod
    def external(cls, *, output_rank: int = 0) -> Self:
        """This process is one rank of the only replica; a launcher made it and its peers."""
        return cls(mode="external", output_rank=output_rank)

    @property
    def supervision(self) -> WorkerSupervisorConfig:
        """`process_config`, or the defaults."""
        return self.process_config if self.process_config is not None else WorkerSupervisorConfig()

    def _check_external(self) -> None:
        placed = "the launcher places its ranks"
        single = "its ranks are one replica; put a gateway over several"
        managed = "the launcher looks after its processes"
        for name, value, fits, reason in (
            ("devices", self.devices, not self.devices, placed),
            ("replica_count", self.replica_count, self.replica_count == 1, single),
            ("process_config", self.process_config, self.process_config is None, managed),
        ):
            if not fits:
                raise ConfigurationError(
                    f"{name}={value!r} cannot be given with mode='external': {reason}; leave it out"
                )

    def _check_local(self) -> None:
        process = self.supervision
        if process.node_rank >= process.num_nodes:
            raise ConfigurationError(
                f"process_config.node_rank={process.node_rank} must be below num_nodes="
                f"{process.num_nodes}: local workers run on this machine; give num_nodes, or use a "
                "launcher and DeploymentConfig.external() for several"
            )
        if process.num_nodes > 1 and (self.replica_count > 1 or self.output_rank):
            raise ConfigurationError(
                f"process_config.num_nodes={process.num_nodes} is for one replica that spans "
                f"machines, whose first rank answers; replica_count={self.replica_count} and "
                f"output_rank={self.output_rank} must be 1 and 0"
            )
        last_port = process.base_port + self.replica_count - 1
        if last_port > MAX_PORT:
            raise ConfigurationError(
                f"base_port={process.base_port} with replica_count={self.replica_count} needs ports "
                f"up to {last_port}, one a replica; the last allowed is {MAX_PORT}"
            )


@dataclass(frozen=True)
class NodeResources:
    """One machine of a deployment: its devices in the order in which ranks take them.

    `address` is where other machines reach it; needed where a replica spans machines and begins
    on this one.
    """

    rank: int
    devices: tuple[int, ...]
    address: str | None = None

    def __post_init__(self) -> None:
        _integer("node rank", self.rank, 0)
        object.__setattr__(self, "devices", normalize_device_indices(self.devices))
        if self.address is not None and (
            not isinstance(self.address, str) or not self.address.strip()
        ):
            raise ConfigurationError(
                f"address={self.address!r} of node {self.rank} must be an address or None"
            )


def normalize_device_indices(devices: Sequence[int | str]) -> tuple[int, ...]:
    """`devices` as different non-negative integers; decimal strings are taken too.

    Raises `ConfigurationError` for anything else, such as UUIDs of GPUs.
    """
    if isinstance(devices, (str, bytes)) or not isinstance(devices, Sequence):
        raise WrongTypeError(
            f"devices={devices!r} must be a sequence of device indices, such as (0, 1); "
            f"{_VISIBILITY}"
        )
    indices = tuple(_device_index(device) for device in devices)
    twice = sorted({index for index in indices if indices.count(index) > 1})
    if twice:
        raise ConfigurationError(
            f"devices={tuple(devices)!r} names device {twice[0]} more than once; each rank needs a "
            "device of its own"
        )
    return indices


_VISIBILITY = "to choose among physical devices, set CUDA_VISIBLE_DEVICES for the whole process"


def _device_index(device: object) -> int:
    if isinstance(device, str) and device.isascii() and device.isdecimal():
        return int(device)
    if isinstance(device, bool) or not isinstance(device, int) or device < 0:
        raise ConfigurationError(
            f"device {device!r} must be a non-negative index into the devices that this process "
            f"sees, such as 0; {_VISIBILITY}"
        )
    return device


def _environment(pairs: object) -> tuple[tuple[str, str], ...]:
    if isinstance(pairs, (str, bytes)) or not isinstance(pairs, Sequence):
        raise WrongTypeError(
            f"extra_env={pairs!r} must be a sequence of (name, value) pairs, such as "
            '(("OMP_NUM_THREADS", "1"),)'
        )
    checked: dict[str, str] = {}
    for pair in pairs:
        if (
            isinstance(pair, (str, bytes))
            or not isinstance(pair, Sequence)
            or len(pair) != 2
            or not all(isinstance(part, str) for part in pair)
        ):
            raise ConfigurationError(f"extra_env: {pair!r} must be a (name, value) pair of strings")
        name, value = pair
        if not name or "=" in name or "\0" in name or "\0" in value:
            raise ConfigurationError(
                f"extra_env: {name!r}={value!r} cannot be a variable; a name must not be empty or "
                "contain =, and neither may contain NUL"
            )
        if name in RESERVED_ENV:
            raise ConfigurationError(
                f"extra_env cannot set {name}: it says where a worker runs or what it imports, and "
                "the engine sets that itself from devices, ParallelConfig and the caller's own "
                "environment"
            )
        if name in checked:
            raise ConfigurationError(f"extra_env sets {name} twice; give it once")
        checked[name] = value
    return tuple(checked.items())


def _integer(name: str, value: object, least: int, most: int | None = None) -> None:
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or value < least
        or (most is not None and value > most)
    ):
        allowed = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ConfigurationError(f"{name}={value!r} must be an integer, {allowed}")


def _seconds(name: str, value: object, *, or_else: str = "") -> None:
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not math.isfinite(value)
        or value <= 0
    ):
        raise ConfigurationError(
            f"{name}={value!r} must be a positive, finite number of seconds{or_else}"
        )
