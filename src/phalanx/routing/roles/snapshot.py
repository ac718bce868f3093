"""What a role has at one moment. A snapshot never changes: its registry replaces it by the next."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from phalanx.schema.roles import (
    RouteMode,
    RoutingSpec,
    WeightSource,
    WorkerType,
    WorkloadType,
)


class ReplicaState(enum.StrEnum):
    """Where a replica is in its life; also what discovery calls it, in lower case."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    SLEEPING = "sleeping"
    ONLOADING = "onloading"
    DEAD = "dead"


@dataclass(frozen=True)
class RoleReplica:
    """One logical replica, at the address of its head.

    `engine_id` is `<model>/<ordinal>` and stays through restarts; `generation` counts those.
    `base_url` is where the gateway sends to, None before it is known. `exposed`: whether others are
    told. `detail`: why it gets no requests, in words, or empty; `blocked`: nobody is certain what
    it holds.
    """

    engine_id: str
    base_url: str | None
    state: ReplicaState
    generation: int = 0
    worker_type: WorkerType = WorkerType.REGULAR
    exposed: bool = True
    weight_version: str | None = None
    detail: str = ""
    blocked: bool = False
    server_id: str = field(init=False, repr=False, compare=False)
    """By which requests in flight are counted: a new process begins with none."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "server_id", f"{self.engine_id}@{self.generation}")

    @property
    def serves(self) -> bool:
        """Whether the gateway may send it a request."""
        return (
            self.state is ReplicaState.READY
            and self.base_url is not None
            and not self.blocked
            and self.worker_type is WorkerType.REGULAR
        )

    @property
    def direct_eligible(self) -> bool:
        """Whether a client that was told of it may send it a request."""
        return self.serves and self.exposed


@dataclass(frozen=True)
class RoleModel:
    """One model. `state` is `ready` while one of its replicas (or its router) takes requests."""

    name: str
    state: ReplicaState
    route_mode: RouteMode = RouteMode.DIRECT
    router_url: str | None = None
    replicas: tuple[RoleReplica, ...] = ()
    served_model_name: str = ""
    weight_source: WeightSource = WeightSource.STATIC
    weight_version: str | None = None
    sampling_defaults: Mapping[str, object] = field(default_factory=dict)
    chat_template_kwargs: Mapping[str, object] = field(default_factory=dict)

    @cached_property
    def serving(self) -> tuple[RoleReplica, ...]:
        """Those that the gateway may send a request to."""
        return tuple(replica for replica in self.replicas if replica.serves)

    @cached_property
    def eligible(self) -> tuple[RoleReplica, ...]:
        """Those that a direct client may send a request to."""
        return tuple(replica for replica in self.replicas if replica.direct_eligible)


@dataclass(frozen=True)
class RoleContent:
    """What is published of a role, all of it at once. `phase`: of the job, None outside of one."""

    workload: WorkloadType
    routing: RoutingSpec
    models: tuple[RoleModel, ...] = ()
    phase: str | None = None
    expose_engine_urls: bool = True

    @cached_property
    def by_name(self) -> Mapping[str, RoleModel]:
        return {model.name: model for model in self.models}


@dataclass(frozen=True)
class RoleSnapshot:
    """`epoch` names the life of the registry. Within it `revision` grows by one with every change
    of `content`, and never otherwise.
    """

    role: str
    epoch: str
    revision: int
    content: RoleContent
