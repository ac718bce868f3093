"""The roles of an RL job, as values: role, models, engine groups, routing and placement.

What a file, a command line or another program's arguments become before anything is started. All of
it is frozen, and what can be refused is refused when it is built.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from phalanx.errors import ConfigurationError

RESERVED_ROLES = frozenset({"v1", "health", "ready", "metrics", "generate", "ping"})
"""Paths of the gateway's own."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class WorkloadType(enum.StrEnum):
    """What the role is asked to do."""

    ROLLOUT = "rollout"
    GENRM = "genrm"
    TEACHER = "teacher"


class WeightSource(enum.StrEnum):
    """Where a model's weights come from after they were loaded.

    `static`: nowhere, they never change. `dcs`: versioned broadcasts that the model registers for.
    `local`: a checkpoint that is loaded again. `actor`: a trainer on the same devices pushes them.
    """

    STATIC = "static"
    DCS = "dcs"
    LOCAL = "local"
    ACTOR = "actor"


class RouteMode(enum.StrEnum):
    """`direct`: to a replica. `sglang_router`: to the model's router, which chooses."""

    DIRECT = "direct"
    SGLANG_ROUTER = "sglang_router"


class RoutingPolicy(enum.StrEnum):
    """How one of several replicas is chosen. `affinity`: the same key goes to the same replica."""

    LEAST_IN_FLIGHT = "least_in_flight"
    AFFINITY = "affinity"


class UnmappedRouteKey(enum.StrEnum):
    """What a route key does that is not in the mapping."""

    REFUSE = "refuse"
    DEFAULT = "default"


class EngineKind(enum.StrEnum):
    """`phalanx` and `sglang` are started here; `external` are servers that somebody else runs."""

    PHALANX = "phalanx"
    SGLANG = "sglang"
    EXTERNAL = "external"


class WorkerType(enum.StrEnum):
    """What a group's replicas do of a request. Prefill and decode go through a router only."""

    REGULAR = "regular"
    PREFILL = "prefill"
    DECODE = "decode"


class Ownership(enum.StrEnum):
    """Who made a placement group, and therefore deletes it."""

    MANAGER = "manager"
    EXTERNAL = "external"
    CONTROLLER = "controller"


class PlacementMode(enum.StrEnum):
    """How roles share devices."""

    DECOUPLED = "decoupled"
    SPLIT = "split"
    DEFER = "defer"


@dataclass(frozen=True)
class ModelPlacement:
    """Where a model's replicas run. `activation_group` and `activation_phase` belong to `defer`:
    roles of one group share `bundle_indices`, and each is resident in its own phase.
    """

    pg_owner: Ownership
    bundle_indices: tuple[int, ...]
    gpu_ids: tuple[int, ...]
    activation_group: str | None
    activation_phase: str | None


@dataclass(frozen=True)
class EngineGroupSpec:
    """Equal replicas of a model.

    `ranks_per_replica` ranks make one replica, on `nodes_per_replica` machines. `engine_args` are
    flags of the server, by their names there. `urls` are those of an `external` group, one a replica.
    """

    num_replicas: int = 1
    engine: EngineKind = EngineKind.PHALANX
    worker_type: WorkerType = WorkerType.REGULAR
    ranks_per_replica: int = 1
    nodes_per_replica: int = 1
    engine_args: Mapping[str, object] = field(default_factory=dict)
    urls: tuple[str, ...] = ()
    placement: ModelPlacement | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "engine_args", MappingProxyType(dict(self.engine_args)))
        for name in ("num_replicas", "ranks_per_replica", "nodes_per_replica"):
            value = getattr(self, name)
            least = 0 if name == "num_replicas" else 1
            if value < least:
                raise ConfigurationError(f"{name}={value} must be at least {least}")
        if self.engine is EngineKind.EXTERNAL and len(self.urls) != self.num_replicas:
            raise ConfigurationError(
                f"an external engine group of {self.num_replicas} replicas has {len(self.urls)}"
                " urls; give one for each"
            )
        if self.engine is not EngineKind.EXTERNAL and self.urls:
            raise ConfigurationError(
                f"urls are given for engine={self.engine.value!r}, which is started here; leave them"
                " out, or say engine: external"
            )


@dataclass(frozen=True)
class InferenceModelSpec:
    """One model of a role.

    `served_model_name` is what its servers call it (None: `name`). `sampling_defaults` apply where
    the gateway itself makes a request of a caller's messages; the caller's values win.
    `chat_template_kwargs` go to the template there. `env_vars` are those of the engines, which get
    no other model's.
    """

    name: str
    model_path: str
    engine_groups: tuple[EngineGroupSpec, ...]
    weight_source: WeightSource = WeightSource.STATIC
    route_mode: RouteMode = RouteMode.DIRECT
    sampling_defaults: Mapping[str, object] = field(default_factory=dict)
    chat_template_kwargs: Mapping[str, object] = field(default_factory=dict)
    env_vars: Mapping[str, str] = field(default_factory=dict)
    elastic_enabled: bool = False
    fault_tolerance_enabled: bool = False
    served_model_name: str | None = None
    router_url: str | None = None
    """A router that somebody else runs; None starts one where the route mode asks for it."""

    def __post_init__(self) -> None:
        check_name("model", self.name)
        object.__setattr__(self, "engine_groups", tuple(self.engine_groups))
        for name in ("sampling_defaults", "chat_template_kwargs", "env_vars"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))
        if not self.engine_groups:
            raise ConfigurationError(f"model {self.name!r} has no engine group")
        if self.router_url is not None and not self.needs_router:
            raise ConfigurationError(
                f"model {self.name!r} has router_url={self.router_url!r} and"
                f" route_mode={self.route_mode.value!r}; a router is used with sglang_router"
            )
        kinds = {group.worker_type for group in self.engine_groups}
        if kinds not in ({WorkerType.REGULAR}, {WorkerType.PREFILL, WorkerType.DECODE}):
            raise ConfigurationError(
                f"model {self.name!r} has engine groups of worker types"
                f" {sorted(kind.value for kind in kinds)}; give prefill and decode, or regular"
            )

    @property
    def needs_weight_update(self) -> bool:
        """Whether replicas get weights before they are ready."""
        return self.weight_source is not WeightSource.STATIC

    @property
    def needs_dcs(self) -> bool:
        """Whether replicas register for versioned broadcasts."""
        return self.weight_source is WeightSource.DCS

    @property
    def needs_router(self) -> bool:
        return self.route_mode is RouteMode.SGLANG_ROUTER

    @property
    def is_disaggregated(self) -> bool:
        """Whether prefill and decode are apart, so that only a router can use the replicas."""
        return any(group.worker_type is not WorkerType.REGULAR for group in self.engine_groups)

    @property
    def public_name(self) -> str:
        """The model's name at its own servers."""
        return self.served_model_name or self.name


@dataclass(frozen=True)
class RoutingSpec:
    """How a request finds its model, for the gateway and for direct clients alike.

    `default_model` None: the role's only model, and none where there are several. `aliases` are
    further names of models. `route_keys` map what callers know (a data source) to a model.
    """

    default_model: str | None = None
    route_keys: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    policy: RoutingPolicy = RoutingPolicy.LEAST_IN_FLIGHT
    on_unmapped_route_key: UnmappedRouteKey = UnmappedRouteKey.REFUSE

    def __post_init__(self) -> None:
        for name in ("route_keys", "aliases"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    def check(self, models: Sequence[str]) -> None:
        """Raises `ConfigurationError` where this names a model that is not one of `models`."""
        known = ", ".join(map(repr, models))
        if self.default_model is not None and self.default_model not in models:
            raise ConfigurationError(
                f"routing.default_model={self.default_model!r} is not a model; models: {known}"
            )
        for name in ("route_keys", "aliases"):
            for key, model in getattr(self, name).items():
                if model not in models:
                    raise ConfigurationError(
                        f"routing.{name}[{key!r}]={model!r} is not a model; models: {known}"
                    )
        for alias in self.aliases:
            if alias in models:
                raise ConfigurationError(
                    f"routing.aliases has {alias!r}, which is a model; choose another alias"
                )


@dataclass(frozen=True)
class DeploymentSpec:
    """How a role's engines are started and stopped; durations in seconds.

    A drain waits `drain_timeout_s` for running requests before they are aborted. An engine that is
    not healthy `startup_timeout_s` after its start has failed.
    """

    placement: PlacementMode = PlacementMode.DECOUPLED
    startup_timeout_s: float = 600.0
    drain_timeout_s: float = 120.0
    offload_timeout_s: float = 120.0
    health_interval_s: float = 5.0
    health_timeout_s: float = 10.0
    max_health_failures: int = 3
    start_asleep: bool = False

    def __post_init__(self) -> None:
        for name in (
            "startup_timeout_s",
            "drain_timeout_s",
            "offload_timeout_s",
            "health_interval_s",
            "health_timeout_s",
        ):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigurationError(f"{name}={value} must be a finite number above 0")
        if self.max_health_failures < 1:
            raise ConfigurationError(
                f"max_health_failures={self.max_health_failures} must be at least 1"
            )


@dataclass(frozen=True)
class InferenceRoleSpec:
    """One role: `role` is its name and the prefix of its paths.

    Without `expose_engine_urls` nobody but the gateway learns where the engines are.
    """

    role: str
    workload: WorkloadType
    deployment: DeploymentSpec
    routing: RoutingSpec
    models: tuple[InferenceModelSpec, ...]
    expose_engine_urls: bool = True

    def __post_init__(self) -> None:
        check_name("role", self.role)
        if self.role in RESERVED_ROLES:
            raise ConfigurationError(
                f"role {self.role!r} is a path of the gateway's own; choose another name"
            )
        object.__setattr__(self, "models", tuple(self.models))
        if not self.models:
            raise ConfigurationError(f"role {self.role!r} has no model")
        names = [model.name for model in self.models]
        for name in names:
            if names.count(name) > 1:
                raise ConfigurationError(f"role {self.role!r} has the model {name!r} twice")
        self.routing.check(names)

    def model(self, name: str) -> InferenceModelSpec:
        """The model of that name; it has to exist."""
        return next(model for model in self.models if model.name == name)

    @property
    def engine_groups(self) -> tuple[EngineGroupSpec, ...]:
        """Those of all models, in their order."""
        return tuple(group for model in self.models for group in model.engine_groups)


def check_name(what: str, name: str) -> None:
    """A name that can stand in a path: raises `ConfigurationError`."""
    if not _NAME.fullmatch(name):
        raise ConfigurationError(
            f"{what} name {name!r} must begin with a letter or digit and hold only letters, digits,"
            " '.', '_' and '-', at most 100"
        )
