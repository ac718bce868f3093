"""Arguments of Relax's training command as what a planner is asked: a pure function.

Roles on the trainer's devices (`colocate`) take turns with the trainer: all of them together where
each has devices of its own, one after the other where scorers are deferred.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from phalanx.roles.placement.phase_order import TRAIN
from phalanx.roles.relax_args import roles_of
from phalanx.roles.relax_flags import RelaxFlags
from phalanx.roles.relax_layout import Layout
from phalanx.schema.job_placement import (
    TRAINER,
    ClusterSpec,
    NodeSpec,
    PhaseSpec,
    PlacementRequest,
)
from phalanx.schema.roles import (
    EngineGroupSpec,
    EngineKind,
    InferenceRoleSpec,
    PlacementMode,
)

INFERENCE = "inference"
"""The phase of all roles, where only the trainer gives way to them."""


def placement_of_relax_args(
    arguments: Mapping[str, object], cluster: ClusterSpec | None = None
) -> PlacementRequest:
    """The roles of `from_relax_args` with their bundles, the trainer's devices and the phases.

    `cluster` None: as many machines of `--num-gpus-per-node` as are needed. Raises
    `ConfigurationError`.
    """
    flags = RelaxFlags(arguments)
    layout = Layout(flags)
    roles = roles_of(flags, layout)
    trainer = 0 if flags.is_on("debug_rollout_only") else layout.actor_gpus
    if not layout.is_colocated:
        # Each has a group of its own, in which the planner finds its place.
        roles = tuple(_with_mode(role, PlacementMode.DECOUPLED, bundles=False) for role in roles)
        nodes = cluster or _enough_nodes(roles, trainer, layout.gpus_per_node)
        return PlacementRequest(PlacementMode.DECOUPLED, nodes, roles, trainer)
    deferred = any(role.deployment.placement is PlacementMode.DEFER for role in roles)
    together = (
        PhaseSpec(INFERENCE, tuple(role.role for role in roles)),
        PhaseSpec(TRAIN, (TRAINER,)),
    )
    return PlacementRequest(
        mode=PlacementMode.DEFER,
        cluster=cluster or _nodes(layout.actor_gpus, layout.gpus_per_node),
        roles=tuple(_with_mode(role, PlacementMode.DEFER, bundles=True) for role in roles),
        trainer_devices=trainer,
        phases=() if deferred else together,
    )


def _with_mode(role: InferenceRoleSpec, mode: PlacementMode, *, bundles: bool) -> InferenceRoleSpec:
    models = role.models
    if not bundles:
        models = tuple(
            replace(
                model,
                engine_groups=tuple(
                    replace(group, placement=None) for group in model.engine_groups
                ),
            )
            for model in models
        )
    deployment = replace(role.deployment, placement=mode)
    return replace(role, models=models, deployment=deployment)


def _nodes(gpus: int, per_node: int) -> ClusterSpec:
    sizes = [min(per_node, gpus - first) for first in range(0, gpus, per_node)]
    return ClusterSpec(tuple(NodeSpec(f"node-{number}", size) for number, size in enumerate(sizes)))


def _enough_nodes(roles: Sequence[InferenceRoleSpec], trainer: int, per_node: int) -> ClusterSpec:
    """Also where each group begins on a machine of its own."""
    needed = -(-trainer // per_node)
    for group in _started(roles):
        if group.ranks_per_replica > per_node:
            needed += group.num_replicas * group.nodes_per_replica
        else:
            needed += -(-group.num_replicas // (per_node // group.ranks_per_replica))
    return _nodes(needed * per_node, per_node)


def _started(roles: Sequence[InferenceRoleSpec]) -> Iterator[EngineGroupSpec]:
    for role in roles:
        yield from (each for each in role.engine_groups if each.engine is not EngineKind.EXTERNAL)
