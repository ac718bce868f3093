"""Roles and their plans."""

from __future__ import annotations

from dataclasses import replace

from phalanx.roles.placement.planner import plan
from phalanx.schema.job_placement import ClusterSpec, NodeSpec, PlacementPlan, PlacementRequest
from phalanx.schema.roles import (
    DeploymentSpec,
    EngineGroupSpec,
    InferenceModelSpec,
    InferenceRoleSpec,
    PlacementMode,
    RoutingSpec,
    WorkloadType,
)


def role_of(name: str, *groups: EngineGroupSpec, **model: object) -> InferenceRoleSpec:
    return InferenceRoleSpec(
        name,
        WorkloadType.ROLLOUT,
        DeploymentSpec(),
        RoutingSpec(),
        (InferenceModelSpec(name, "m", groups, **model),),
    )


def planned(
    roles: list[InferenceRoleSpec],
    *nodes: int,
    mode: PlacementMode = PlacementMode.DECOUPLED,
    names: list[str] | None = None,
    memory: int | None = None,
    **fields: object,
) -> PlacementPlan:
    names = names or [f"node-{number}" for number in range(len(nodes))]
    cluster = ClusterSpec(tuple(map(NodeSpec, names, nodes)), memory)
    placed = tuple(
        replace(role, deployment=replace(role.deployment, placement=mode)) for role in roles
    )
    return plan(PlacementRequest(mode, cluster, placed, **fields))
