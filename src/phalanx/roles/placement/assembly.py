"""Devices that were dealt, as placement groups with their owners and replicas on their bundles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from phalanx.errors import ConfigurationError
from phalanx.roles.placement.claim import TRAINER_KEY, Claim, GroupKey
from phalanx.roles.placement.layout import Devices
from phalanx.roles.placement.phase_order import turns
from phalanx.schema.job_placement import (
    ACTOR_GROUP,
    TRAINER,
    Bundle,
    PhaseSpec,
    PlacementGroupPlan,
    PlacementPlan,
    PlacementRequest,
    ReplicaPlacement,
    group_name,
)
from phalanx.schema.roles import InferenceRoleSpec, ModelPlacement, Ownership, PlacementMode

Placements = Mapping[GroupKey, ModelPlacement]


def assembled(
    request: PlacementRequest,
    phases: tuple[PhaseSpec, ...],
    claims: Sequence[Claim],
    devices: Devices,
) -> PlacementPlan:
    """The plan; of roles without claims only the phases say something."""
    bundles = request.cluster.bundles()
    if request.mode is PlacementMode.DECOUPLED:
        numbers, groups = _own_groups(request, claims, devices, bundles)
    else:
        numbers, groups = _one_group(claims, devices, bundles)
    deferred = request.mode is PlacementMode.DEFER
    placements = {
        claim.key: ModelPlacement(
            pg_owner=_owner(request, claim.user),
            bundle_indices=tuple(numbers[claim.key]),
            gpu_ids=tuple(bundles[device].device for device in devices[claim.key]),
            activation_group=ACTOR_GROUP if deferred else None,
            activation_phase=turns(phases, claim.user)[0] if deferred else None,
        )
        for claim in claims
        if claim.key != TRAINER_KEY
    }
    return PlacementPlan(
        mode=request.mode,
        cluster=request.cluster,
        groups=groups,
        roles=tuple(_placed(role, request.mode, placements) for role in request.roles),
        replicas=tuple(_replicas(request, placements)),
        trainer_bundles=tuple(numbers.get(TRAINER_KEY, ())),
        phases=phases,
    )


def _owner(request: PlacementRequest, user: str) -> Ownership:
    """Who makes and deletes the group of a role, or of the trainer."""
    if request.mode is not PlacementMode.DECOUPLED or user == TRAINER:
        return Ownership.CONTROLLER
    return Ownership.EXTERNAL if user in request.external_groups else Ownership.MANAGER


def _one_group(
    claims: Sequence[Claim], devices: Devices, bundles: Sequence[Bundle]
) -> tuple[Devices, tuple[PlacementGroupPlan, ...]]:
    """All devices up to the last one that is used: a bundle's number is that of its device."""
    if not claims:
        return {}, ()
    used = max(max(devices[claim.key]) for claim in claims) + 1
    users = tuple(dict.fromkeys(claim.user for claim in claims))
    group = PlacementGroupPlan(ACTOR_GROUP, Ownership.CONTROLLER, tuple(bundles[:used]), users)
    return devices, (group,)


def _own_groups(
    request: PlacementRequest,
    claims: Sequence[Claim],
    devices: Devices,
    bundles: Sequence[Bundle],
) -> tuple[Devices, tuple[PlacementGroupPlan, ...]]:
    """One a user, its bundles in the order of nodes and devices."""
    numbers, groups = Devices(), []
    of_user: dict[str, list[Claim]] = {}
    for claim in claims:
        of_user.setdefault(claim.user, []).append(claim)
    for user, own in of_user.items():
        used = sorted(device for claim in own for device in devices[claim.key])
        position = {device: index for index, device in enumerate(used)}
        for claim in own:
            numbers[claim.key] = [position[device] for device in devices[claim.key]]
        groups.append(
            PlacementGroupPlan(
                group_name(request.mode, user),
                _owner(request, user),
                tuple(bundles[device] for device in used),
                (user,),
            )
        )
    return numbers, tuple(groups)


def _placed(
    role: InferenceRoleSpec, mode: PlacementMode, placements: Placements
) -> InferenceRoleSpec:
    """The role with its bundles. One that takes turns starts when its turn comes."""
    models = tuple(
        replace(
            model,
            engine_groups=tuple(
                replace(
                    group,
                    placement=_as_said(
                        f"roles.{role.role}.models.{model.name}",
                        group.placement,
                        placements.get((role.role, model.name, index)),
                    ),
                )
                for index, group in enumerate(model.engine_groups)
            ),
        )
        for model in role.models
    )
    has_bundles = any(group.placement for model in models for group in model.engine_groups)
    if not has_bundles:
        return replace(role, models=models)
    deferred = mode is PlacementMode.DEFER
    deployment = replace(
        role.deployment,
        placement=mode,
        start_asleep=deferred or role.deployment.start_asleep,
    )
    return replace(role, models=models, deployment=deployment)


def _as_said(
    place: str, said: ModelPlacement | None, planned: ModelPlacement | None
) -> ModelPlacement | None:
    """What is planned, which must be what a program has said beside the bundles."""
    if said is None or planned is None:
        return planned
    for name in ("gpu_ids", "activation_group", "activation_phase"):
        given, made = getattr(said, name), getattr(planned, name)
        if given and given != made:
            raise ConfigurationError(
                f"{place}: {name}={given!r}, and by its bundles and phases it is {made!r}; leave it"
                " out, which is then filled in, or change bundles or placement.phases"
            )
    return planned


def _replicas(request: PlacementRequest, placements: Placements) -> Iterator[ReplicaPlacement]:
    for role in request.roles:
        name = group_name(request.mode, role.role)
        for model in role.models:
            ordinal = 0
            for index, group in enumerate(model.engine_groups):
                placement = placements.get((role.role, model.name, index))
                size = group.ranks_per_replica
                for number in range(group.num_replicas):
                    if placement is not None:
                        mine = placement.bundle_indices[number * size : (number + 1) * size]
                        yield ReplicaPlacement(role.role, model.name, index, ordinal, name, mine)
                    ordinal += 1
