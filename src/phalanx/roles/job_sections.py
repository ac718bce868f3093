"""The parts of `roles.yaml` as they are written there, with their defaults."""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from phalanx import settings
from phalanx.errors import ConfigurationError
from phalanx.schema.roles import (
    DeploymentSpec,
    EngineKind,
    PlacementMode,
    RouteMode,
    RoutingSpec,
    WeightSource,
    WorkerType,
    WorkloadType,
)


class GatewaySection(msgspec.Struct, frozen=True, kw_only=True):
    """The one gateway of the job: the flags of `phalanx gateway` that matter to roles.

    `grpc` is where it listens for robots, on any free port unless it is given.
    """

    http_host: str = "127.0.0.1"
    http_port: int = 30000
    grpc: str = "127.0.0.1:0"
    api_key: str | None = None
    admin_key: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    request_timeout_s: float = 600.0
    drain_timeout_s: float = 30.0
    max_message_mib: float = 100.0
    access_log: bool = False


class ControlSection(msgspec.Struct, frozen=True, kw_only=True):
    """Where the control process listens on this machine, 0 being any free port, and the bearer key
    that it asks for.
    """

    port: int = 0
    key: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigurationError(f"port={self.port} must be from 0 to 65535")
        if self.key is not None and not (
            self.key and self.key.isascii() and self.key.isprintable()
        ):
            raise ConfigurationError("key must be printable ASCII, and not empty")


class LauncherKind(enum.StrEnum):
    """`local`: processes of this machine. `ray`: on the machines of a Ray cluster."""

    LOCAL = "local"
    RAY = "ray"


class LauncherSection(msgspec.Struct, frozen=True, kw_only=True):
    """Where replicas that are started here listen, on any free ports unless there is a first one,
    and the interpreters that have SGLang and sglang-router (None: the one that runs this).

    `address` and `namespace` are those of a Ray cluster: None is the one that this machine belongs
    to, or one that is started for the job alone. It has `deadline_s` to have devices free.
    """

    kind: LauncherKind = LauncherKind.LOCAL
    host: str = "127.0.0.1"
    first_port: int | None = None
    sglang_python: str | None = None
    router_python: str | None = None
    address: str | None = None
    namespace: str | None = None
    deadline_s: float | None = None

    def __post_init__(self) -> None:
        if self.first_port is not None and not 1 <= self.first_port <= 65535:
            raise ConfigurationError(f"first_port={self.first_port} must be from 1 to 65535")
        if self.kind is LauncherKind.RAY:
            if self.host != "127.0.0.1":
                raise ConfigurationError(
                    f"host={self.host!r} is given for kind: ray, where replicas listen at the"
                    " addresses that machines have in the cluster; leave it out, and say"
                    " --node-ip-address to `ray start`"
                )
            if self.deadline_s is not None and not 0 < self.deadline_s < float("inf"):
                raise ConfigurationError(
                    f"deadline_s={self.deadline_s} must be a finite number above 0"
                )
            return
        for name in ("address", "namespace", "deadline_s"):
            given = getattr(self, name)
            if given is not None:
                raise ConfigurationError(
                    f"{name}={given!r} is that of a cluster, and kind is local; say kind: ray, or"
                    f" leave {name} out"
                )


class LogSection(msgspec.Struct, frozen=True, kw_only=True):
    """From which `level` on the processes log (None: PHALANX_LOG_LEVEL, else INFO), and where to:
    a file a process in `directory` (None: beside the job's run file).
    """

    level: str | None = None
    directory: str | None = None

    def __post_init__(self) -> None:
        if self.level is not None and self.level not in settings.LOG_LEVELS:
            allowed = ", ".join(settings.LOG_LEVELS)
            raise ConfigurationError(f"level={self.level!r} is not known; allowed: {allowed}")


class PlacementSection(msgspec.Struct, frozen=True, kw_only=True):
    """On which devices the roles and the trainer run, and in which phases.

    `nodes` are that many of `devices_per_node`, or a list of names and devices. `device_memory_mib`
    makes the devices simulated ones of that size. Each of `phases` is a name or a `PhaseSection`.
    """

    mode: PlacementMode = PlacementMode.DECOUPLED
    nodes: int | list[Any] = 1
    devices_per_node: int | None = None
    device_memory_mib: int | None = None
    trainer_devices: int = 0
    phases: list[Any] = []
    external_groups: tuple[str, ...] = ()


class NodeSection(msgspec.Struct, frozen=True, kw_only=True):
    """A machine; `devices` None: `devices_per_node`."""

    name: str
    devices: int | None = None


class PhaseSection(msgspec.Struct, frozen=True, kw_only=True):
    """A phase and who may be resident in it: roles, or the trainer."""

    name: str
    roles: tuple[str, ...]


class GroupSection(msgspec.Struct, frozen=True, kw_only=True):
    """Equal replicas of a model. `replicas` None: one, or as many as there are `urls`, `devices` or
    `bundles` for.
    """

    engine: EngineKind = EngineKind.PHALANX
    replicas: int | None = None
    devices: int | None = None
    bundles: tuple[int, ...] = ()
    worker_type: WorkerType = WorkerType.REGULAR
    ranks: int = 1
    nodes: int = 1
    engine_args: dict[str, Any] = {}
    urls: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        counts = (
            ("replicas", self.replicas, 0),
            ("ranks", self.ranks, 1),
            ("nodes", self.nodes, 1),
        )
        for name, value, least in counts:
            if value is not None and value < least:
                raise ConfigurationError(f"{name}={value} must be at least {least}")


class ModelSection(GroupSection, frozen=True, kw_only=True):
    """A model. It is one group of replicas, described by its own keys, or lists several `groups`,
    each a `GroupSection`.
    """

    model: str | None = None
    groups: list[Any] = []
    weight_source: WeightSource = WeightSource.STATIC
    route_mode: RouteMode = RouteMode.DIRECT
    router_url: str | None = None
    served_model_name: str | None = None
    sampling: dict[str, Any] = {}
    chat_template_kwargs: dict[str, Any] = {}
    env: dict[str, Any] = {}
    elastic: bool = True
    fault_tolerance: bool = True


class RoleSection(msgspec.Struct, frozen=True, kw_only=True):
    """A role. `workload` None: its name, where that is one. Each of `models` is a `ModelSection`."""

    models: dict[Any, Any] = {}
    workload: WorkloadType | None = None
    routing: RoutingSpec = RoutingSpec()
    deployment: DeploymentSpec = DeploymentSpec()
    expose_engine_urls: bool = True


class JobSection(msgspec.Struct, frozen=True, kw_only=True):
    """The whole file. Each of `roles` is a `RoleSection`, `placement` a `PlacementSection` or its mode
    alone, and `launcher` a `LauncherSection` or its kind alone.
    """

    roles: dict[Any, Any]
    gateway: GatewaySection = GatewaySection()
    control: ControlSection = ControlSection()
    launcher: Any = None
    placement: Any = None
    log: LogSection = LogSection()
