"""Requests for the planner, and what must hold of any plan, found out without the planner."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.schema.job_placement import (
    TRAINER,
    Bundle,
    ClusterSpec,
    NodeSpec,
    PhaseSpec,
    PlacementPlan,
    PlacementRequest,
)
from phalanx.schema.roles import (
    DeploymentSpec,
    EngineGroupSpec,
    EngineKind,
    InferenceModelSpec,
    InferenceRoleSpec,
    ModelPlacement,
    Ownership,
    PlacementMode,
    RoutingSpec,
    WorkloadType,
)

DECOUPLED, SPLIT, DEFER = PlacementMode.DECOUPLED, PlacementMode.SPLIT, PlacementMode.DEFER


def group(replicas: int = 1, ranks: int = 1, bundles: Sequence[int] = (), **fields):
    placement = None
    if bundles:
        owner = fields.pop("owner", Ownership.CONTROLLER)
        placement = ModelPlacement(owner, tuple(bundles), fields.pop("gpu_ids", ()), None, None)
    return EngineGroupSpec(
        num_replicas=replicas, ranks_per_replica=ranks, placement=placement, **fields
    )


def external(count: int = 1):
    urls = tuple(f"http://127.0.0.1:{port}" for port in range(1, count + 1))
    return EngineGroupSpec(num_replicas=count, engine=EngineKind.EXTERNAL, urls=urls)


def role(name: str, *groups: EngineGroupSpec, workload: str = "", **deployment):
    kind = workload or (name if name in set(WorkloadType) else "teacher")
    model = InferenceModelSpec(f"{name}-model", "/m", groups or (group(),))
    return InferenceRoleSpec(
        name, WorkloadType(kind), DeploymentSpec(**deployment), RoutingSpec(), (model,)
    )


def nodes(*sizes: int, memory: int | None = None) -> ClusterSpec:
    made = tuple(NodeSpec(f"n{number}", size) for number, size in enumerate(sizes))
    return ClusterSpec(made, memory)


def request(mode: PlacementMode, cluster: ClusterSpec, *roles: InferenceRoleSpec, **fields):
    phases = tuple(PhaseSpec(name, names) for name, names in fields.pop("phases", {}).items())
    external_groups = frozenset(fields.pop("external_groups", ()))
    return PlacementRequest(
        mode, cluster, roles, phases=phases, external_groups=external_groups, **fields
    )


def where(plan: PlacementPlan) -> dict[str, list[str]]:
    """Devices by engine."""
    return {
        replica.engine_id: [str(bundle) for bundle in plan.bundles(replica)]
        for replica in plan.replicas
    }


def violations(asked: PlacementRequest, plan: PlacementPlan) -> list[str]:
    """What a plan breaks of what was asked for."""
    return [
        *_outside(plan),
        *_missing(asked, plan),
        *_straddling(asked, plan),
        *_overlaps(plan),
        *_wrong_groups(asked, plan),
    ]


def _outside(plan: PlacementPlan):
    sizes = {node.name: node.num_devices for node in plan.cluster.nodes}
    for placed in plan.groups:
        for bundle in placed.bundles:
            if not 0 <= bundle.device < sizes.get(bundle.node, 0):
                yield f"{bundle} is no device of the cluster"


def _missing(asked: PlacementRequest, plan: PlacementPlan):
    for spec in asked.roles:
        for model in spec.models:
            wanted = sum(
                each.num_replicas
                for each in model.engine_groups
                if each.engine is not EngineKind.EXTERNAL
            )
            mine = [
                one for one in plan.replicas if (one.role, one.model) == (spec.role, model.name)
            ]
            if len(mine) != wanted or len({one.ordinal for one in mine}) != wanted:
                yield f"{model.name} has {len(mine)} of {wanted} replicas"
            for one in mine:
                ranks = model.engine_groups[one.group_index].ranks_per_replica
                if len(set(plan.bundles(one))) != ranks:
                    yield f"{one.engine_id} has not a device a rank"
    if len(plan.bundles_of(TRAINER)) != asked.trainer_devices:
        yield "the trainer has not its devices"


def _straddling(asked: PlacementRequest, plan: PlacementPlan):
    sizes = {node.name: node.num_devices for node in plan.cluster.nodes}
    specs = {model.name: model for spec in asked.roles for model in spec.models}
    for one in plan.replicas:
        bundles = plan.bundles(one)
        wanted = specs[one.model].engine_groups[one.group_index].nodes_per_replica
        on = list(dict.fromkeys(bundle.node for bundle in bundles))
        if len(on) != wanted:
            yield f"{one.engine_id} is on {on}"
        for name in on:
            devices = [bundle.device for bundle in bundles if bundle.node == name]
            if devices != list(range(devices[0], devices[0] + len(devices))):
                yield f"{one.engine_id} has {devices} of {name}"
            if wanted > 1 and len(devices) != sizes[name]:
                yield f"{one.engine_id} does not fill {name}"


def _overlaps(plan: PlacementPlan):
    """Two that may be resident at the same time, on one bundle."""
    claims: list[tuple[str, str, Bundle]] = [
        (one.role, f"{one.role} {one.engine_id}", bundle)
        for one in plan.replicas
        for bundle in plan.bundles(one)
    ]
    claims += [(TRAINER, TRAINER, bundle) for bundle in plan.bundles_of(TRAINER)]
    turns = {
        user: {phase.name for phase in plan.phases if user in phase.roles} for user in plan.users()
    }
    for at, (user, name, bundle) in enumerate(claims):
        for other, other_name, theirs in claims[:at]:
            if theirs != bundle:
                continue
            by_turns = plan.mode is DEFER and user != other
            if not by_turns or turns[user] & turns[other]:
                yield f"{name} and {other_name} are both on {bundle}"


def _wrong_groups(asked: PlacementRequest, plan: PlacementPlan):
    order = {
        bundle: at
        for at, bundle in enumerate(
            Bundle(node.name, device)
            for node in plan.cluster.nodes
            for device in range(node.num_devices)
        )
    }
    owned: list[Bundle] = []
    for placed in plan.groups:
        places = [order[bundle] for bundle in placed.bundles]
        if places != sorted(set(places)):
            yield f"the bundles of {placed.name} are not in the order of nodes and devices"
        owned += placed.bundles
    if len(owned) != len(set(owned)):
        yield "a device is in two groups"
    if plan.mode is not DECOUPLED and len(plan.groups) > 1:
        yield "there is more than the one group"
    if plan.mode is DECOUPLED and any(len(placed.users) != 1 for placed in plan.groups):
        yield "a group has several users"
    for spec in plan.roles:
        for model in spec.models:
            for each in model.engine_groups:
                if (each.placement is None) != (
                    each.engine is EngineKind.EXTERNAL or not each.num_replicas
                ):
                    yield f"{model.name} has no placement, or one too many"
