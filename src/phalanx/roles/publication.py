"""What is published of a role: one content, made of all its pools at one moment."""

from __future__ import annotations

from collections.abc import Iterable

from phalanx.roles.replica import Replica
from phalanx.roles.weights import initial_target
from phalanx.routing.roles.snapshot import (
    ReplicaState,
    RoleContent,
    RoleModel,
    RoleReplica,
)
from phalanx.schema.roles import InferenceModelSpec, InferenceRoleSpec

_SHOWN_FIRST = (
    ReplicaState.ONLOADING,
    ReplicaState.STARTING,
    ReplicaState.DRAINING,
    ReplicaState.SLEEPING,
    ReplicaState.DEAD,
)
"""Of a model that serves nothing: what is nearest to serving says what is going on."""


def initial_content(spec: InferenceRoleSpec) -> RoleContent:
    """What the registry of a role begins with, before anything is started."""
    asleep = spec.deployment.start_asleep
    idle = ReplicaState.SLEEPING if asleep else ReplicaState.STARTING
    models = []
    for model in spec.models:
        target = initial_target(model)
        version = None if target is None else target.version
        models.append(model_shown(spec, model, (), idle, weight_version=version))
    return role_content(spec, models)


def role_content(
    spec: InferenceRoleSpec, models: Iterable[RoleModel], phase: str | None = None
) -> RoleContent:
    return RoleContent(
        workload=spec.workload,
        routing=spec.routing,
        models=tuple(models),
        phase=phase,
        expose_engine_urls=spec.expose_engine_urls,
    )


def model_shown(
    spec: InferenceRoleSpec,
    model: InferenceModelSpec,
    replicas: Iterable[Replica],
    idle: ReplicaState,
    *,
    router_url: str | None = None,
    weight_version: str | None = None,
) -> RoleModel:
    """One model. `idle` is its state while it has no replica."""
    shown = tuple(replica.shown(exposed=spec.expose_engine_urls) for replica in replicas)
    return RoleModel(
        name=model.name,
        state=_state(model, shown, idle),
        route_mode=model.route_mode,
        router_url=router_url,
        replicas=shown,
        served_model_name=model.public_name,
        weight_source=model.weight_source,
        weight_version=weight_version,
        sampling_defaults=model.sampling_defaults,
        chat_template_kwargs=model.chat_template_kwargs,
    )


def _state(
    model: InferenceModelSpec, replicas: Iterable[RoleReplica], idle: ReplicaState
) -> ReplicaState:
    """Ready with a ready replica of each type that a request needs."""
    replicas = tuple(replicas)
    ready = {each.worker_type for each in replicas if each.state is ReplicaState.READY}
    if ready and ready == {group.worker_type for group in model.engine_groups}:
        return ReplicaState.READY
    states = {each.state for each in replicas}
    return next((state for state in _SHOWN_FIRST if state in states), idle)
