"""The command that starts one replica of a model: a function of its specification alone, so that
nothing that was set for another model or role reaches it.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from phalanx import settings
from phalanx.errors import ConfigurationError
from phalanx.roles.child_process import Command
from phalanx.roles.contracts import ReplicaLaunch
from phalanx.roles.engine_ranks import TP_NAMES, plain_names, says_ranks, sglang_tensor_parallel
from phalanx.roles.replica_devices import SimulatedCluster, real_devices
from phalanx.schema.roles import EngineKind, WeightSource, WorkerType

PHALANX_FLAGS = frozenset(
    {
        "base_port",
        "context_length",
        "device",
        "devices",
        "dtype",
        "log_json",
        "log_level",
        "max_batch_size",
        "max_step_tokens",
        "native_operators",
        "num_threads",
        "pool_tokens",
        "quantization",
        "replicas",
        "seed",
        "tp",
    }
)
"""Flags of `phalanx serve` that an engine group may have; any key with a dot goes to its --set."""
_WORKER_TYPE = "say it as the group's worker_type"
_LAUNCHER = "the launcher chooses it"
_WEIGHTS = "say it as the model's weight_source"
_NODES = "say it as the group's nodes"
_KEY = "who may ask, and over TLS, is the gateway's matter; engines listen inside"
_PATH, _NAME = "say it as the model's path", "say it as the model's served_model_name"
PHALANX_OWN: Mapping[str, str] = {
    "model": _PATH,
    "plugin_args.checkpoint_dir": _PATH,
    "served_model_name": _NAME,
    "server.served_model_name": _NAME,
    "server.model_name": _NAME,
    "host": _LAUNCHER,
    "server.host": _LAUNCHER,
    "port": _LAUNCHER,
    "server.port": _LAUNCHER,
    "role": _WORKER_TYPE,
    "server.role": _WORKER_TYPE,
    "bootstrap_port": _LAUNCHER,
    "server.bootstrap_port": _LAUNCHER,
    "nnodes": _NODES,
    "node_rank": _LAUNCHER,
    "dist_init_addr": _LAUNCHER,
    "weight_source": _WEIGHTS,
    "server.weight_source": _WEIGHTS,
    "api_key": _KEY,
    "server.api_key": _KEY,
    "tls_cert": _KEY,
    "server.tls_cert": _KEY,
    "tls_key": _KEY,
    "server.tls_key": _KEY,
    "log_file": "each replica's log is kept by the launcher",
    "log.file": "each replica's log is kept by the launcher",
}
"""What an engine group cannot say, and what to do instead."""
SGLANG_OWN: Mapping[str, str] = {
    "model": _PATH,
    "model_path": _PATH,
    "served_model_name": _NAME,
    "host": _LAUNCHER,
    "port": _LAUNCHER,
    "api_key": _KEY,
    "ssl_certfile": _KEY,
    "ssl_keyfile": _KEY,
    "disaggregation_mode": _WORKER_TYPE,
    "disaggregation_bootstrap_port": _LAUNCHER,
    "nnodes": _NODES,
    "node_rank": _LAUNCHER,
    "dist_init_addr": _LAUNCHER,
}
BOOTSTRAP_PORT = "bootstrap_port"


@dataclass(frozen=True)
class EnginePrograms:
    """What is run for each kind of engine; the replica's flags follow."""

    phalanx: tuple[str, ...] = (
        sys.executable,
        "-P",
        "-c",
        "from phalanx.cli.main import main; main()",
        "serve",
    )
    sglang: tuple[str, ...] = (sys.executable, "-m", "sglang.launch_server")

    @classmethod
    def with_sglang(cls, python: str) -> EnginePrograms:
        """SGLang of another environment, by its interpreter."""
        return cls(sglang=(python, "-m", "sglang.launch_server"))


@dataclass(frozen=True)
class ListenAddress:
    """Where the replica listens; `bootstrap_port` is that of a prefill worker."""

    host: str
    port: int
    bootstrap_port: int | None = None

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


@dataclass(frozen=True)
class EngineSpan:
    """One machine's part of a replica that spans several: `node_rank` 0 is the head, which alone
    listens, and all of them meet at `meeting`, HOST:PORT of the head's machine. `key` is what those
    of our own engines know one another by.
    """

    num_nodes: int
    node_rank: int
    meeting: str
    key: str = field(repr=False)

    def flags(self) -> list[str]:
        """The same for every kind of engine."""
        flags = ["--nnodes", str(self.num_nodes), "--node-rank", str(self.node_rank)]
        return [*flags, "--dist-init-addr", self.meeting]


def engine_command(
    launch: ReplicaLaunch,
    address: ListenAddress,
    programs: EnginePrograms,
    simulated: SimulatedCluster | None = None,
    span: EngineSpan | None = None,
) -> Command:
    """Raises `ConfigurationError` for what can never start. `simulated` are the devices that it
    runs on, and None real ones, or none. `span`: it is one of several processes of its replica.
    """
    group = launch.group
    if simulated is None and span is None:
        _check_machine(launch)
    _check_directory(launch)
    # Where the launcher listens is in `address`, also what was asked of it for this replica.
    extra = {name: value for name, value in launch.extra_args.items() if name != BOOTSTRAP_PORT}
    options = {**group.engine_args, **extra}
    match group.engine:
        case EngineKind.PHALANX:
            program, flags = programs.phalanx, _phalanx_flags(launch, address, options)
        case EngineKind.SGLANG:
            program, flags = programs.sglang, _sglang_flags(launch, address, options)
        case EngineKind.EXTERNAL:
            raise ConfigurationError(
                f"{launch.engine_id} is external, run by somebody else; nothing can be started"
            )
    flags += [] if span is None else span.flags()
    keys = {}
    if span is not None and group.engine is EngineKind.PHALANX:
        keys = settings.node_key_variable(span.key)
    return Command((*program, *flags), {**keys, **_environment(launch, program[0], simulated)})


def _check_machine(launch: ReplicaLaunch) -> None:
    if launch.group.nodes_per_replica > 1:
        raise ConfigurationError(
            f"{launch.engine_id}: nodes_per_replica={launch.group.nodes_per_replica}, but here are"
            " the processes of one machine; use 1, launcher: ray, or engine: external"
        )


def _check_directory(launch: ReplicaLaunch) -> None:
    path = launch.model.model_path
    if path.startswith(("/", "./", "../", "~")) and not os.path.isdir(os.path.expanduser(path)):
        raise ConfigurationError(
            f"model {launch.model.name!r}: model_path={path!r} is no directory; give that of a"
            " checkpoint"
        )


def _phalanx_flags(
    launch: ReplicaLaunch, address: ListenAddress, options: Mapping[str, object]
) -> list[str]:
    model, group = launch.model, launch.group
    flags = ["--model", os.path.expanduser(model.model_path)]
    flags += ["--host", address.host, "--port", str(address.port)]
    flags += ["--served-model-name", model.public_name]
    if not model.needs_weight_update:
        flags += ["--weight-source", "static"]
    if group.worker_type is not WorkerType.REGULAR:
        flags += ["--role", group.worker_type.value]
    if address.bootstrap_port is not None:
        flags += ["--bootstrap-port", str(address.bootstrap_port)]
    if group.ranks_per_replica > 1 and not says_ranks(options):
        flags += ["--tp", str(group.ranks_per_replica)]
    for name, value in options.items():
        if value is None:
            continue
        _refuse_own(launch, name, PHALANX_OWN)
        if "." in name:
            flags += ["--set", f"{name}={_json(value)}"]
            continue
        plain = name.replace("-", "_")
        if plain not in PHALANX_FLAGS:
            raise _unknown(launch, name)
        flags += _flag(plain, value, ",")
    return flags


def _sglang_flags(
    launch: ReplicaLaunch, address: ListenAddress, options: Mapping[str, object]
) -> list[str]:
    model, group = launch.model, launch.group
    plain = plain_names(options)
    # Without these two nothing is freed, and weights that nobody sends again are lost.
    plain.setdefault("enable_memory_saver", True)
    if model.weight_source is WeightSource.STATIC:
        plain.setdefault("enable_weights_cpu_backup", True)
    if not any(name in plain for name in TP_NAMES):
        ranks = _tensor_parallel_ranks(launch, plain)
        if ranks > 1:
            plain["tp_size"] = ranks
    flags = ["--model-path", os.path.expanduser(model.model_path)]
    flags += ["--host", address.host, "--port", str(address.port)]
    flags += ["--served-model-name", model.public_name]
    if group.worker_type is not WorkerType.REGULAR:
        flags += ["--disaggregation-mode", group.worker_type.value]
    if address.bootstrap_port is not None:
        flags += ["--disaggregation-bootstrap-port", str(address.bootstrap_port)]
    for name, value in plain.items():
        _refuse_own(launch, name, SGLANG_OWN)
        flags += _flag(name, value, None)
    return flags


def _tensor_parallel_ranks(launch: ReplicaLaunch, options: Mapping[str, object]) -> int:
    try:
        return sglang_tensor_parallel(options, launch.group.ranks_per_replica)
    except ConfigurationError as error:
        raise ConfigurationError(f"model {launch.model.name!r}: {error}") from None


def _flag(name: str, value: object, separator: str | None) -> list[str]:
    """A flag with its value; a list's values are joined, or follow one another (None)."""
    flag = "--" + name.replace("_", "-")
    if value is None or value is False:
        return []
    if value is True:
        return [flag]
    if isinstance(value, (list, tuple)):
        words = [str(one) for one in value]
        return [flag, separator.join(words)] if separator is not None else [flag, *words]
    return [flag, str(value) if isinstance(value, (str, int, float)) else _json(value)]


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _refuse_own(launch: ReplicaLaunch, name: str, own: Mapping[str, str]) -> None:
    reason = own.get(name.replace("-", "_"))
    if reason is not None:
        raise ConfigurationError(
            f"model {launch.model.name!r}: engine_args has {name!r}; {reason}, and leave it out"
        )


def _unknown(launch: ReplicaLaunch, name: str) -> ConfigurationError:
    near = difflib.get_close_matches(name.replace("-", "_"), PHALANX_FLAGS, 1)
    hint = f"did you mean {near[0]!r}?" if near else "give a flag of phalanx serve"
    return ConfigurationError(
        f"model {launch.model.name!r}: engine_args has {name!r}, which phalanx serve does not have;"
        f" {hint} A key of its configuration is written with its section, as plugin_args.page_size"
    )


def _environment(
    launch: ReplicaLaunch, program: str, simulated: SimulatedCluster | None
) -> dict[str, str]:
    model = launch.model
    devices = real_devices(launch) if simulated is None else simulated.of_replica(launch)
    values = {"PYTHONUNBUFFERED": "1", **devices}
    return settings.machine_environment(
        {**values, **model.env_vars}, same_python=program == sys.executable
    )
