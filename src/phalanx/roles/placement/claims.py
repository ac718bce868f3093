"""What each group of replicas, and the trainer, need of a cluster, and whether an engine of that
shape can stand on its nodes at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from phalanx.errors import ConfigurationError
from phalanx.roles.engine_ranks import check_ranks
from phalanx.roles.placement.claim import TRAINER_KEY, Claim, GroupKey
from phalanx.roles.placement.given_bundles import given_bundles
from phalanx.schema.job_placement import ClusterSpec, PlacementRequest
from phalanx.schema.roles import EngineGroupSpec, EngineKind, InferenceRoleSpec, PlacementMode


def claims_of(request: PlacementRequest) -> tuple[Claim, ...]:
    """Of all groups in the order of the roles, and of the trainer at the end; of those that need
    devices. Raises `ConfigurationError` where a group's own numbers do not go together.
    """
    claims = [claim for role in request.roles for claim in _of_role(request, role)]
    if request.trainer_devices < 0:
        raise ConfigurationError(
            f"placement.trainer_devices={request.trainer_devices} must be at least 0, which is none"
        )
    if request.trainer_devices:
        count = request.trainer_devices
        claims.append(Claim(TRAINER_KEY, "placement.trainer_devices", count, 1, 1))
    return tuple(claims)


def _of_role(request: PlacementRequest, role: InferenceRoleSpec) -> Iterator[Claim]:
    for model in role.models:
        for index, group in enumerate(model.engine_groups):
            place = f"roles.{role.role}.models.{model.name}"
            if len(model.engine_groups) > 1:
                place += f".groups[{index}]"
            claim = _of_group((role.role, model.name, index), place, group, request.mode)
            if claim is not None and claim.num_devices:
                yield claim


def _of_group(
    key: GroupKey, place: str, group: EngineGroupSpec, mode: PlacementMode
) -> Claim | None:
    if group.engine is EngineKind.EXTERNAL:
        if group.placement is not None:
            raise ConfigurationError(
                f"{place} has bundles, and engine: external, whose devices are not this job's;"
                " leave bundles out, or start the engines here"
            )
        return None
    try:
        check_ranks(group)
    except ConfigurationError as error:
        raise ConfigurationError(f"{place}: {error}") from None
    size, count, nodes = group.ranks_per_replica, group.num_replicas, group.nodes_per_replica
    if size % nodes:
        raise ConfigurationError(
            f"{place}.nodes={nodes} does not divide ranks={size}; an engine has equally many ranks"
            f" on each node, so change nodes to a divisor of {size}, or ranks"
        )
    claim = Claim(key, place, size, count, nodes)
    if group.placement is None:
        return claim
    return replace(claim, given=given_bundles(claim, group.placement, mode))


def check_shapes(claims: Sequence[Claim], cluster: ClusterSpec) -> None:
    """Refuse engines that no node can hold, or that are spread over more nodes than they need."""
    sizes = {node.num_devices for node in cluster.nodes}
    largest = max(sizes, default=0)
    if claims and not largest:
        raise ConfigurationError(
            "placement.nodes have no devices; say how many in placement.devices_per_node, or in the"
            " list of nodes"
        )
    for claim in claims:
        if claim.key == TRAINER_KEY:
            continue
        if claim.num_nodes == 1 and claim.size > largest:
            raise ConfigurationError(
                f"{claim.place}.ranks={claim.size} is more than a node's {largest} devices, and"
                f" nodes=1; {_spread(claim.size, sizes)}, set ranks to at most {largest}, or say"
                " larger nodes in placement.devices_per_node"
            )
        each = claim.size // claim.num_nodes
        if claim.num_nodes > 1 and each not in sizes:
            known = ", ".join(map(str, sorted(sizes)))
            raise ConfigurationError(
                f"{claim.place}.nodes={claim.num_nodes} puts {each} of ranks={claim.size} on a node,"
                f" and nodes have {known} devices; an engine over several nodes uses whole ones, a"
                f" smaller one stays on one: {_spread(claim.size, sizes)}, or change ranks"
            )


def _spread(size: int, sizes: set[int]) -> str:
    """What `nodes` may be for an engine of this size."""
    if any(size <= devices for devices in sizes):
        return "set nodes to 1"
    fitting = [size // devices for devices in sorted(sizes) if devices and size % devices == 0]
    if not fitting:
        return "set ranks to a multiple of a node's devices"
    return f"set nodes to {fitting[-1]}"
