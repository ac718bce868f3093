"""The `placement` of a job's file, and what a group of replicas says of its devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.errors import ConfigurationError
from phalanx.roles.file_section import file_section
from phalanx.roles.job_sections import GroupSection, NodeSection, PhaseSection, PlacementSection
from phalanx.roles.placement.phase_order import TRAIN
from phalanx.schema.job_placement import (
    MAX_DEVICES,
    TRAINER,
    ClusterSpec,
    NodeSpec,
    PhaseSpec,
    PlacementRequest,
)
from phalanx.schema.roles import (
    EngineKind,
    InferenceRoleSpec,
    ModelPlacement,
    Ownership,
    PlacementMode,
)

_MIB = 1 << 20
_MAX_MIB = 1 << 40
_KEY = "placement"


def placement_section(value: object, source: str) -> PlacementSection | None:
    """What stands there: a mapping, or a mode alone. None where nothing does."""
    if value is None:
        return None
    return file_section(
        {"mode": value} if isinstance(value, str) else value, PlacementSection, source, _KEY
    )


def placement_request(
    section: PlacementSection, roles: tuple[InferenceRoleSpec, ...], source: str
) -> PlacementRequest:
    """What a planner is asked for these roles. Raises `ConfigurationError`."""
    try:
        cluster = ClusterSpec(_nodes(section, source), _device_memory_bytes(section))
        phases = tuple(
            _phase(value, f"{_KEY}.phases[{index}]", source, roles)
            for index, value in enumerate(section.phases)
        )
    except ConfigurationError as error:
        if str(error).startswith(f"{source}: "):
            raise
        raise ConfigurationError(f"{source}: {_KEY}: {error}") from None
    return PlacementRequest(
        mode=section.mode,
        cluster=cluster,
        roles=roles,
        trainer_devices=section.trainer_devices,
        phases=phases,
        external_groups=frozenset(section.external_groups),
    )


def check_role_mode(
    section: PlacementSection | None,
    written: Mapping[str, Any],
    roles: Sequence[InferenceRoleSpec],
    source: str,
) -> None:
    """Refuse a role's own word that is not the job's, and bundles of a job without a placement.

    `written` are the roles as they stand in the file.
    """
    mode = PlacementMode.DECOUPLED if section is None else section.mode
    for role in roles:
        said = role.deployment.placement
        if said is not mode and "placement" in (written[role.role].get("deployment") or {}):
            raise ConfigurationError(
                f"{source}: roles.{role.role}.deployment.placement={said.value!r}, and the job's"
                f" placement is {mode.value}; leave it out, or say {_KEY}: {said.value} for the whole"
                " job"
            )
        if section is None and any(group.placement for group in role.engine_groups):
            raise ConfigurationError(
                f"{source}: roles.{role.role} has bundles, and the job no placement; leave bundles"
                f" out, or say {_KEY}: split or {_KEY}: defer"
            )


def check_started_asleep(
    written: Mapping[str, Any],
    given: Sequence[InferenceRoleSpec],
    planned: Sequence[InferenceRoleSpec],
    source: str,
) -> None:
    """Refuse a role's own word that it starts awake, where by the plan it waits for its turn.

    `written` are the roles as they stand in the file, `given` what they say and `planned` what comes
    of it.
    """
    for said, made in zip(given, planned, strict=True):
        changed = said.deployment.start_asleep is not made.deployment.start_asleep
        if changed and "start_asleep" in (written[said.role].get("deployment") or {}):
            raise ConfigurationError(
                f"{source}: roles.{said.role}.deployment.start_asleep=false, and with {_KEY}: defer"
                " a role starts asleep: it has its devices from its first phase on; leave"
                f" start_asleep out, say true, or say {_KEY}: split, in which every role has devices"
                " of its own"
            )


def num_replicas(section: GroupSection) -> int:
    """As a group says, else one a url, or as many as its devices or bundles are enough for, else 1.
    Raises `ConfigurationError`.
    """
    external = section.engine is EngineKind.EXTERNAL
    if external and section.devices is not None:
        raise ConfigurationError(
            f"devices={section.devices} is given for engine: external, whose devices are not this"
            " job's; leave devices out"
        )
    if section.replicas is not None:
        if section.devices is not None:
            raise ConfigurationError(
                f"replicas={section.replicas} and devices={section.devices} are both given; leave one"
                f" of them out (replicas are devices / ranks, and ranks={section.ranks})"
            )
        return section.replicas
    if external:
        return len(section.urls)
    name, budget = "bundles", len(section.bundles)
    if section.devices is not None:
        name, budget = "devices", section.devices
    if section.devices is None and not section.bundles:
        return 1
    ranks = max(1, section.ranks)
    if budget < 0 or budget % ranks:
        said = f"{name}={budget}" if name == "devices" else f"{budget} bundles"
        raise ConfigurationError(
            f"{said} cannot be cut into engines of ranks={ranks}; give a multiple of {ranks}, change"
            " ranks, or say replicas instead"
        )
    return budget // ranks


def group_placement(section: GroupSection) -> ModelPlacement | None:
    """The bundles that it was given by hand; they are those of the job's one group."""
    if not section.bundles:
        return None
    return ModelPlacement(Ownership.CONTROLLER, section.bundles, (), None, None)


def _device_memory_bytes(section: PlacementSection) -> int | None:
    memory = section.device_memory_mib
    if memory is not None and not 1 <= memory <= _MAX_MIB:
        raise ConfigurationError(f"device_memory_mib={memory} must be from 1 to {_MAX_MIB}")
    return None if memory is None else memory * _MIB


def _nodes(section: PlacementSection, source: str) -> tuple[NodeSpec, ...]:
    each = section.devices_per_node
    if each is not None and each < 1:
        raise ConfigurationError(f"devices_per_node={each} must be at least 1")
    if isinstance(section.nodes, int):
        if section.nodes < 1:
            raise ConfigurationError(f"nodes={section.nodes} must be at least 1")
        if each is not None:
            said = f"nodes={section.nodes} of devices_per_node={each}"
            _check_num_devices(section.nodes * each, said)
            return tuple(NodeSpec(f"node-{number}", each) for number in range(section.nodes))
        if section.nodes > 1:
            raise ConfigurationError(
                f"nodes={section.nodes} is given without devices_per_node; say how many devices each"
                " has, or list nodes with their name and devices"
            )
        return ()
    made = []
    for index, value in enumerate(section.nodes):
        node = file_section(value, NodeSection, source, f"{_KEY}.nodes[{index}]")
        devices = each if node.devices is None else node.devices
        if devices is None:
            raise ConfigurationError(
                f"nodes[{index}] ({node.name}) has no devices; say devices there, or devices_per_node"
            )
        made.append(NodeSpec(node.name, devices))
    if not made:
        raise ConfigurationError("nodes is empty; list at least one, or leave nodes out")
    _check_num_devices(sum(node.num_devices for node in made), "nodes")
    return tuple(made)


def _check_num_devices(count: int, said: str) -> None:
    if count > MAX_DEVICES:
        raise ConfigurationError(
            f"{said} are {count:,} devices, and a plan has at most {MAX_DEVICES:,}; give fewer"
        )


def _phase(value: object, path: str, source: str, roles: Sequence[InferenceRoleSpec]) -> PhaseSpec:
    if not isinstance(value, str):
        given = file_section(value, PhaseSection, source, path)
        return PhaseSpec(given.name, given.roles)
    if value == TRAIN and all(role.role != TRAIN for role in roles):
        return PhaseSpec(TRAIN, (TRAINER,))
    return PhaseSpec(value, (value,))
