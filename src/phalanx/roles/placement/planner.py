"""`plan`: a pure function from what a job asks for to every bundle of it. Whatever cannot be is
refused here, before a placement group, a router, an engine or a data source is made.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from phalanx.errors import ConfigurationError
from phalanx.roles.placement.assembly import assembled
from phalanx.roles.placement.claim import Claim
from phalanx.roles.placement.claims import check_shapes, claims_of
from phalanx.roles.placement.layout import ALWAYS, Devices, Turns, lay_out
from phalanx.roles.placement.phase_order import phases_of, turns
from phalanx.schema.job_placement import (
    ACTOR_GROUP,
    MAX_DEVICES,
    TRAINER,
    ClusterSpec,
    NodeSpec,
    PhaseSpec,
    PlacementPlan,
    PlacementRequest,
)
from phalanx.schema.roles import InferenceRoleSpec, PlacementMode

FIRST_NODE = "node-0"


def plan(request: PlacementRequest) -> PlacementPlan:
    """Where every replica and the trainer run, and when. Raises `ConfigurationError`.

    A cluster without nodes: one node with as many devices as are needed or, for a decoupled job
    that says nothing else of devices, no plan of them at all.
    """
    check_role_names(request.roles)
    for role in request.roles:
        _check_mode(role, request.mode)
    _check_external(request)
    claims = claims_of(request)
    users = dict.fromkeys(claim.user for claim in claims)
    phases = phases_of(request, users)
    taken_in = _turns(request.mode, users, phases)
    if _says_no_devices(request):
        return replace(assembled(request, phases, (), {}), roles=request.roles)
    cluster, devices = _laid_out(request, claims, taken_in)
    return assembled(replace(request, cluster=cluster), phases, claims, devices)


def _says_no_devices(request: PlacementRequest) -> bool:
    given = (*request.cluster.nodes, request.cluster.device_memory_bytes, request.trainer_devices)
    return request.mode is PlacementMode.DECOUPLED and not any(given)


def _turns(mode: PlacementMode, users: Iterable[str], phases: Sequence[PhaseSpec]) -> Turns:
    if mode is not PlacementMode.DEFER:
        return dict.fromkeys(users, ALWAYS)
    order = [phase.name for phase in phases]
    found = {user: turns(phases, user) for user in users}
    return dict(sorted(found.items(), key=lambda pair: order.index(pair[1][0])))


def _laid_out(
    request: PlacementRequest, claims: Sequence[Claim], taken_in: Turns
) -> tuple[ClusterSpec, Devices]:
    cluster, mode = request.cluster, request.mode
    if cluster.nodes:
        check_shapes(claims, cluster)
        return cluster, lay_out(claims, cluster, taken_in, mode)
    for claim in claims:
        if claim.num_nodes > 1:
            raise ConfigurationError(
                f"{claim.place}.nodes={claim.num_nodes}, and placement says nothing of nodes; give"
                " placement.nodes and placement.devices_per_node, or leave nodes out"
            )
    roomy = replace(cluster, nodes=(NodeSpec(FIRST_NODE, _enough_devices(claims)),))
    check_shapes(claims, roomy)
    devices = lay_out(claims, roomy, taken_in, mode)
    used = max((max(mine) + 1 for mine in devices.values()), default=0)
    return replace(cluster, nodes=(NodeSpec(FIRST_NODE, used),)), devices


def _enough_devices(claims: Sequence[Claim]) -> int:
    """For all claims on one node, wherever the bundles are that some were given by hand."""
    for claim in claims:
        if max(claim.given, default=0) >= MAX_DEVICES:
            raise ConfigurationError(
                f"{claim.place}.bundles has {max(claim.given)}, and a plan has at most"
                f" {MAX_DEVICES:,} devices; choose smaller numbers, or leave bundles out"
            )
    needed: dict[str, int] = {}
    for claim in claims:
        needed[claim.user] = needed.get(claim.user, 0) + claim.num_devices
    total = sum(needed.values())
    if total > MAX_DEVICES:
        who = ", ".join(f"{user} {count:,}" for user, count in needed.items())
        raise ConfigurationError(
            f"the job needs {total:,} devices ({who}), and a plan has at most {MAX_DEVICES:,}; give"
            " fewer replicas, smaller ranks or fewer trainer_devices"
        )
    return total + 1 + max((bundle for claim in claims for bundle in claim.given), default=0)


def check_role_names(roles: Sequence[InferenceRoleSpec]) -> None:
    """Refuse names that placement has a meaning for, and the same name twice."""
    seen: set[str] = set()
    for role in roles:
        if role.role in (TRAINER, ACTOR_GROUP):
            what = "the trainer in phases" if role.role == TRAINER else "the trainer's group"
            raise ConfigurationError(
                f"roles.{role.role}: {role.role!r} is the name of {what}; choose another name, and"
                " say workload for it"
            )
        if role.role in seen:
            raise ConfigurationError(f"roles.{role.role} is given twice; choose another name")
        seen.add(role.role)


def _check_mode(role: InferenceRoleSpec, mode: PlacementMode) -> None:
    # Decoupled is also what a role has that says nothing.
    said = role.deployment.placement
    if said not in (mode, PlacementMode.DECOUPLED):
        raise ConfigurationError(
            f"roles.{role.role}.deployment.placement={said.value!r}, and placement.mode="
            f"{mode.value!r} is the whole job's; leave it out, or say placement.mode: {said.value}"
        )


def _check_external(request: PlacementRequest) -> None:
    known = [role.role for role in request.roles]
    for name in sorted(request.external_groups):
        if name not in known:
            raise ConfigurationError(
                f"placement.external_groups has {name!r}, which is no role; roles:"
                f" {', '.join(known)}"
            )
    if request.external_groups and request.mode is not PlacementMode.DECOUPLED:
        names = ", ".join(sorted(request.external_groups))
        raise ConfigurationError(
            f"placement.external_groups has {names}, and with placement.mode={request.mode.value}"
            f" all roles are in the one group {ACTOR_GROUP!r}, which the controller makes and deletes;"
            " leave external_groups out, or say placement.mode: decoupled"
        )
