"""The only file that touches environment variables; each of ours is `PHALANX_<NAME>` and is listed
here.
"""

from __future__ import annotations

import atexit
import gc
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from phalanx.errors import ConfigurationError

T = TypeVar("T")

PREFIX = "PHALANX_"


def _read(name: str, parse: Callable[[str], T], allowed: str) -> T | None:
    raw = os.environ.get(PREFIX + name)
    if raw is None or raw == "":
        return None
    try:
        return parse(raw)
    except ValueError:
        raise ConfigurationError(
            f"environment variable {PREFIX}{name}={raw!r} is not valid; allowed: {allowed}"
        ) from None


def _positive_int(raw: str) -> int:
    value = int(raw)
    if value < 1:
        raise ValueError(raw)
    return value


def _positive_seconds(raw: str) -> float:
    value = float(raw)
    if not 0.0 < value < float("inf"):
        raise ValueError(raw)
    return value


def _log_level(raw: str) -> str:
    level = raw.upper()
    if level not in LOG_LEVELS:
        raise ValueError(raw)
    return level


LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")

_PARALLEL = "describe it in EngineConfig.parallel, for example "
_DEPLOYMENT = "describe it in the engine's deployment, for example "
REMOVED = {
    "TP_SIZE": _PARALLEL + "ParallelConfig(dense=DenseParallelConfig(tp_size=2))",
    "EP_SIZE": _PARALLEL + "ParallelConfig(moe=MoeParallelConfig(ep_size=2))",
    "SP_SIZE": _PARALLEL + "ParallelConfig(dense=DenseParallelConfig(sequence_parallel=True))",
    "CP_SIZE": _PARALLEL + "ParallelConfig(attention=AttentionParallelConfig(cp_size=2))",
    "DECODE_CP_SIZE": _PARALLEL
    + "ParallelConfig(attention=AttentionParallelConfig(decode_cp_size=2))",
    "DP_SIZE": _DEPLOYMENT
    + "DeploymentConfig.local(replica_count=2), or set the dp_size of a part of ParallelConfig",
    "CFG_SIZE": _PARALLEL + "ParallelConfig(outer=OuterParallelConfig(cfg_size=2))",
    "PP_SIZE": _PARALLEL + "ParallelConfig(outer=OuterParallelConfig(pipeline_size=2))",
    "PIPELINE_SIZE": _PARALLEL + "ParallelConfig(outer=OuterParallelConfig(pipeline_size=2))",
    "WORLD_SIZE": "it follows from EngineConfig.parallel (infer_replica_world_size())",
    "REPLICA_COUNT": _DEPLOYMENT + "DeploymentConfig.local(replica_count=2)",
    "REPLICA_ID": "the engine numbers its replicas itself",
    "REPLICA_RANK": "the engine numbers its ranks itself",
    "RANK": "the engine, or the launcher through RANK, numbers ranks",
    "LOCAL_RANK": "the engine, or the launcher through LOCAL_RANK, places ranks",
    "NODE_RANK": "give it to the launcher of the ranks",
    "WORKER_ID": "the engine numbers its workers itself",
    "DEVICES": _DEPLOYMENT + "DeploymentConfig.local(devices=(0, 1))",
}
"""Variables without their prefix that would change a topology, and what to do instead."""


def device() -> str | None:
    """`PHALANX_DEVICE`: the device target, for example `cpu` or `cuda:0`."""
    return _read("DEVICE", str, "a torch device such as cpu or cuda:0")


def params_dtype() -> str | None:
    """`PHALANX_PARAMS_DTYPE`: the parameters' dtype by name, for example `bfloat16`."""
    return _read("PARAMS_DTYPE", str, "float32, bfloat16 or float16")


def num_threads() -> int | None:
    """`PHALANX_NUM_THREADS`: torch threads of the thread that computes."""
    return _read("NUM_THREADS", _positive_int, "a positive integer")


def seed() -> int | None:
    """`PHALANX_SEED`: seed of the process's random generators."""
    return _read("SEED", int, "an integer")


def dist_timeout_s() -> float | None:
    """`PHALANX_DIST_TIMEOUT_S`: how long a rank waits for the others in a collective."""
    return _read("DIST_TIMEOUT_S", _positive_seconds, "a positive number of seconds")


def given() -> dict[str, str]:
    """The variables of ours that are set, by their whole names; of a secret, only that it is."""
    return {
        name: "(set)" if name == PREFIX + _NODE_KEY else os.environ[name]
        for name in sorted(os.environ)
        if name.startswith(PREFIX)
    }


def refuse_removed() -> None:
    """Raise if a variable is set that would describe a topology: it has no effect, and silence
    would let a job run with another topology than its author meant.
    """
    found = [name for name in REMOVED if os.environ.get(PREFIX + name)]
    if found:
        raise ConfigurationError(
            "topology is not read from the environment; unset "
            + "; unset ".join(f"{PREFIX}{name}: {REMOVED[name]}" for name in found)
        )


def log_level() -> str | None:
    """`PHALANX_LOG_LEVEL`: one of DEBUG, INFO, WARNING, ERROR."""
    return _read("LOG_LEVEL", _log_level, ", ".join(LOG_LEVELS))


def cache_dir() -> Path:
    """`PHALANX_CACHE_DIR`: converted models and built operators (default `~/.cache/phalanx`)."""
    override = _read("CACHE_DIR", Path, "a directory")
    if override is not None:
        return override
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "phalanx"


@dataclass(frozen=True)
class SimulatedDevices:
    """Devices of a ledger that this process has, in its own numbering, and what it is called there."""

    file: Path
    devices: tuple[int, ...]
    owner: str | None = None

    def variable(self) -> dict[str, str]:
        """The environment variable that says this."""
        owner = "" if self.owner is None else f"@{self.owner}"
        numbers = ",".join(map(str, self.devices))
        return {PREFIX + "SIMULATED_DEVICES": f"{self.file}:{numbers}{owner}"}


_NODE_KEY = "NODE_KEY"
_MIN_KEY_LENGTH = 16


def node_key() -> str | None:
    """`PHALANX_NODE_KEY`: the secret that the machines of one replica share."""
    key = _read("NODE_KEY", str, "a text")
    if key is not None and len(key) < _MIN_KEY_LENGTH:
        raise ConfigurationError(
            f"environment variable {PREFIX}{_NODE_KEY} has {len(key)} characters; allowed are"
            f" {_MIN_KEY_LENGTH} or more, as `openssl rand -hex 32` makes them"
        )
    return key


def node_key_variable(key: str) -> dict[str, str]:
    """The environment variable that says this to a process."""
    return {PREFIX + _NODE_KEY: key}


_SIMULATED = re.compile(r"(?P<file>.+):(?P<devices>\d+(?:,\d+)*)(?:@(?P<owner>[^@:]+))?")


def simulated_devices() -> SimulatedDevices | None:
    """`PHALANX_SIMULATED_DEVICES`: a ledger's file and which of its devices this process has, as
    `/run/job.devices:0,1`, or with the name to hold them by as `/run/job.devices:0,1@trainer`.
    """
    return _read("SIMULATED_DEVICES", _devices, "FILE:N,N,... or FILE:N,N,...@OWNER, each N once")


def _devices(raw: str) -> SimulatedDevices:
    found = _SIMULATED.fullmatch(raw)
    if found is None:
        raise ValueError(raw)
    devices = tuple(map(int, found["devices"].split(",")))
    if len(set(devices)) != len(devices):
        raise ValueError(raw)
    return SimulatedDevices(Path(found["file"]), devices, found["owner"])


@dataclass(frozen=True)
class Launcher:
    """What a launcher such as torchrun said about this process: which of how many ranks it is.

    `local_rank` counts the ranks on this machine; None where the launcher does not tell.
    """

    rank: int
    world_size: int
    local_rank: int | None = None


def launcher() -> Launcher | None:
    """`RANK`, `WORLD_SIZE` and `LOCAL_RANK`; None without a launcher.

    Raises where only one of the first two is set, or a value is not a possible one.
    """
    rank, world_size = _rank("RANK"), _rank("WORLD_SIZE")
    if rank is None and world_size is None:
        return None
    if rank is None or world_size is None:
        given, missing = ("WORLD_SIZE", "RANK") if rank is None else ("RANK", "WORLD_SIZE")
        raise ConfigurationError(
            f"environment variable {given}={os.environ[given]!r} is set without {missing}; "
            "a launcher sets both: use one such as torchrun, or unset it"
        )
    if not rank < world_size:
        raise ConfigurationError(
            f"environment variable RANK={rank} must be less than WORLD_SIZE={world_size}"
        )
    return Launcher(rank, world_size, _rank("LOCAL_RANK"))


def launcher_address() -> tuple[str, int]:
    """Where a launcher's ranks meet: `MASTER_ADDR` and `MASTER_PORT`. Raises where either is unset."""
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdecimal():
        raise ConfigurationError(
            f"environment variables MASTER_ADDR={host!r} and MASTER_PORT={port!r} must name an "
            "address and a port; a launcher such as torchrun sets both"
        )
    return host, int(port)


def _rank(name: str) -> int | None:
    raw = os.environ.get(name)
    if raw is None or raw == "":
        return None
    if not (raw.isascii() and raw.isdecimal()):
        raise ConfigurationError(
            f"environment variable {name}={raw!r} is not valid; allowed: a decimal integer from 0 "
            "on, as a launcher such as torchrun sets it"
        )
    return int(raw)


def child_environment(values: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with `values` set, for a process that it starts."""
    return {**os.environ, **values}


_OF_THE_MACHINE = frozenset(
    {
        "PATH",
        "HOME",
        "USER",
        "LOGNAME",
        "SHELL",
        "TMPDIR",
        "LANG",
        "LANGUAGE",
        "TZ",
        "LD_LIBRARY_PATH",
        "CUDA_HOME",
        "CUDA_VISIBLE_DEVICES",
        "NVIDIA_VISIBLE_DEVICES",
        "XDG_CACHE_HOME",
        "XDG_RUNTIME_DIR",
        "HF_HOME",
        "HF_HUB_OFFLINE",
        "SSL_CERT_FILE",
        "SSL_CERT_DIR",
        "OMP_NUM_THREADS",
        "PYTHONDONTWRITEBYTECODE",
        PREFIX + "CACHE_DIR",
    }
)
_OF_THE_PYTHON = frozenset({"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"})


def machine_environment(values: Mapping[str, str], *, same_python: bool) -> dict[str, str]:
    """What of this process's environment tells of the machine, with `values` over it.

    For a process whose configuration is complete without the rest: nothing that was set for this
    process, or for another one, reaches it. `same_python`: it runs this interpreter, and gets
    its import path too.
    """
    kept = _OF_THE_MACHINE | _OF_THE_PYTHON if same_python else _OF_THE_MACHINE
    machine = {
        name: value for name, value in os.environ.items() if name in kept or name.startswith("LC_")
    }
    return {**machine, **values}


def limit_thread_spinning() -> None:
    """Let waiting OpenMP threads sleep after a short spin, unless the user has chosen otherwise.

    A thread that spins keeps the core from the one that it waits for: with as many threads as
    cores and anything else running, long spins make a step several times slower. Works before
    torch is imported only, so that a command calls it first.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "5000")


@contextmanager
def importing() -> Iterator[None]:
    """What is imported in here stays: it is not looked through for garbage meanwhile, nor ever again.

    For a process that is ours. torch alone is a million objects, which every collection would visit.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def end_without_collecting() -> None:
    """Let what there is when this process ends just end: with torch, looking through all of it for
    garbage is a quarter of what a short command takes.
    """
    atexit.register(gc.freeze)


def keep_gloo_on_loopback() -> None:
    """Let torch's CPU collectives listen on loopback alone, unless the user has chosen otherwise.

    They would take the address of the machine's name, which the network may reach.
    """
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
