"""Where the roles of a job and its trainer run: what is asked for, and what a planner answers.

A bundle is one device of one node, in a placement group that one owner makes and deletes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from phalanx.errors import ConfigurationError
from phalanx.schema.roles import InferenceRoleSpec, Ownership, PlacementMode, check_name

TRAINER = "trainer"
"""The trainer's name among the roles that phases and leases are about; no role may have it."""
MAX_DEVICES = 1_000_000
"""Of a plan: more than a cluster has, and few enough to be planned in seconds."""
ACTOR_GROUP = "actor"
"""The placement group of a job whose roles share the trainer's devices."""


@dataclass(frozen=True)
class NodeSpec:
    """A machine with devices of its own, numbered from 0."""

    name: str
    num_devices: int

    def __post_init__(self) -> None:
        check_name("node", self.name)
        if self.num_devices < 0:
            raise ConfigurationError(
                f"node {self.name!r}: num_devices={self.num_devices} is below 0"
            )


@dataclass(frozen=True)
class ClusterSpec:
    """The devices that a job may use. `device_memory_bytes` is the budget of a simulated device;
    None means real ones.
    """

    nodes: tuple[NodeSpec, ...]
    device_memory_bytes: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "nodes", tuple(self.nodes))
        for name, count in Counter(node.name for node in self.nodes).items():
            if count > 1:
                raise ConfigurationError(f"node {name!r} is given {count} times; name each once")
        if self.device_memory_bytes is not None and self.device_memory_bytes < 1:
            raise ConfigurationError(
                f"device_memory_bytes={self.device_memory_bytes} must be at least 1"
            )

    @property
    def num_devices(self) -> int:
        return sum(node.num_devices for node in self.nodes)

    def first_numbers(self) -> dict[str, int]:
        """Of each node the number of its first device, counted over all of them."""
        sizes = (node.num_devices for node in self.nodes)
        return dict(
            zip((node.name for node in self.nodes), accumulate(sizes, initial=0), strict=False)
        )

    def bundles(self) -> list[Bundle]:
        """All devices, in the order of nodes and devices."""
        return [Bundle(node.name, at) for node in self.nodes for at in range(node.num_devices)]


@dataclass(frozen=True)
class PhaseSpec:
    """A part of a step of the job: these roles (or `TRAINER`) are resident in it, and no others
    that share a bundle with them.
    """

    name: str
    roles: tuple[str, ...]

    def __post_init__(self) -> None:
        check_name("phase", self.name)
        object.__setattr__(self, "roles", tuple(self.roles))


@dataclass(frozen=True)
class PlacementRequest:
    """What a planner is asked. `trainer_devices` 0: no trainer has devices here. `phases` empty: the
    planner's own order of them. With `external_groups`, a decoupled role's placement group is made
    and deleted by somebody else.
    """

    mode: PlacementMode
    cluster: ClusterSpec
    roles: tuple[InferenceRoleSpec, ...]
    trainer_devices: int = 0
    phases: tuple[PhaseSpec, ...] = ()
    external_groups: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Bundle:
    """One device: `device` counts those of its node from 0."""

    node: str
    device: int

    def __str__(self) -> str:
        return f"{self.node}:{self.device}"


@dataclass(frozen=True)
class PlacementGroupPlan:
    """A placement group; bundles are called by their position in it. `users` are roles and perhaps
    the trainer.
    """

    name: str
    owner: Ownership
    bundles: tuple[Bundle, ...]
    users: tuple[str, ...]


@dataclass(frozen=True)
class ReplicaPlacement:
    """One replica on its bundles, rank by rank. `ordinal` counts those of all groups of its model."""

    role: str
    model: str
    group_index: int
    ordinal: int
    placement_group: str
    bundle_indices: tuple[int, ...]

    @property
    def engine_id(self) -> str:
        return f"{self.model}/{self.ordinal}"


@dataclass(frozen=True)
class PlacementPlan:
    """Every bundle of a job, before anything is made.

    `roles` are those of the request with each group's `placement` filled in; a group of external
    engines has none. `phases` are in their order, in every mode, and never empty. `groups` are
    empty where nothing has devices, or a decoupled job has said of none.
    """

    mode: PlacementMode
    cluster: ClusterSpec
    groups: tuple[PlacementGroupPlan, ...]
    roles: tuple[InferenceRoleSpec, ...]
    replicas: tuple[ReplicaPlacement, ...]
    trainer_bundles: tuple[int, ...]
    """Of the trainer, in the placement group `ACTOR_GROUP`."""
    phases: tuple[PhaseSpec, ...]

    def group(self, name: str) -> PlacementGroupPlan:
        """The placement group of that name; it has to exist."""
        return next(group for group in self.groups if group.name == name)

    def group_name(self, user: str) -> str:
        """As `group_name` in this plan's mode."""
        return group_name(self.mode, user)

    def to_scale_into(self) -> Iterator[ReplicaPlacement]:
        """Replicas that are none yet, on the bundles that their models keep for them. Only a model of
        one group of replicas is scaled.
        """
        for role in self.roles:
            name = self.group_name(role.role)
            for model in (each for each in role.models if len(each.engine_groups) == 1):
                (group,) = model.engine_groups
                size = group.ranks_per_replica
                kept = () if group.placement is None else group.placement.bundle_indices
                for ordinal in range(group.num_replicas, len(kept) // size):
                    mine = kept[ordinal * size : (ordinal + 1) * size]
                    yield ReplicaPlacement(role.role, model.name, 0, ordinal, name, mine)

    def bundles(self, replica: ReplicaPlacement) -> tuple[Bundle, ...]:
        """A replica's devices, rank by rank."""
        group = self.group(replica.placement_group)
        return tuple(group.bundles[index] for index in replica.bundle_indices)

    def bundles_of_trainer(self) -> tuple[Bundle, ...]:
        """The trainer's devices, rank by rank; none where it has none here."""
        bundles = self.group(ACTOR_GROUP).bundles if self.trainer_bundles else ()
        return tuple(bundles[index] for index in self.trainer_bundles)

    def bundles_of(self, user: str) -> frozenset[Bundle]:
        """All devices of a role, or of the trainer; also those that its replicas may be scaled into."""
        if user == TRAINER:
            return frozenset(self.bundles_of_trainer())
        indices = [
            index
            for role in self.roles
            if role.role == user
            for group in role.engine_groups
            if group.placement is not None
            for index in group.placement.bundle_indices
        ]
        bundles = self.group(self.group_name(user)).bundles if indices else ()
        return frozenset(bundles[index] for index in indices)

    def users(self) -> Iterator[str]:
        """The roles, and the trainer if it has devices."""
        yield from (role.role for role in self.roles)
        if self.trainer_bundles:
            yield TRAINER


def group_name(mode: PlacementMode, user: str) -> str:
    """That of the placement group in which a role, or the trainer, has its devices."""
    return user if mode is PlacementMode.DECOUPLED and user != TRAINER else ACTOR_GROUP
