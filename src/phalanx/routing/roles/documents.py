"""A role's snapshot as the documents that others read, and such a document as a snapshot."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from phalanx.errors import MalformedRequestError
from phalanx.routing.roles.snapshot import (
    ReplicaState,
    RoleContent,
    RoleModel,
    RoleReplica,
    RoleSnapshot,
)
from phalanx.schema.roles import RouteMode, RoutingSpec
from phalanx.wire.discovery import (
    DiscoveryDocument,
    EngineEntry,
    InternalDocument,
    InternalEngineEntry,
    InternalModelEntry,
    ModelEntry,
    RoutingEntry,
)


def discovery(snapshot: RoleSnapshot) -> DiscoveryDocument:
    """What clients are told: no address of an engine or router that is not exposed."""
    content = snapshot.content
    return DiscoveryDocument(
        role=snapshot.role,
        registry_epoch=snapshot.epoch,
        topology_revision=snapshot.revision,
        phase=content.phase,
        workload=content.workload,
        expose_engine_urls=content.expose_engine_urls,
        routing=_routing(content.routing),
        models={model.name: _told_model(content, model) for model in content.models},
    )


def internal(snapshot: RoleSnapshot) -> InternalDocument:
    """What the role's own gateway is told; `snapshot_of` gives the same snapshot back."""
    content = snapshot.content
    return InternalDocument(
        role=snapshot.role,
        registry_epoch=snapshot.epoch,
        topology_revision=snapshot.revision,
        phase=content.phase,
        workload=content.workload,
        expose_engine_urls=content.expose_engine_urls,
        routing=_routing(content.routing),
        models={model.name: _internal_model(model) for model in content.models},
    )


def snapshot_of(document: DiscoveryDocument) -> RoleSnapshot:
    """The snapshot that a document of either kind tells of.

    Raises `MalformedRequestError` for a state that no replica can be in.
    """
    content = RoleContent(
        workload=document.workload,
        routing=_routing_spec(document.routing),
        models=tuple(_model(name, entry, document) for name, entry in document.models.items()),
        phase=document.phase,
        expose_engine_urls=document.expose_engine_urls,
    )
    return RoleSnapshot(document.role, document.registry_epoch, document.topology_revision, content)


def _routing(spec: RoutingSpec) -> RoutingEntry:
    return RoutingEntry(
        default_model=spec.default_model,
        route_keys=dict(spec.route_keys),
        aliases=dict(spec.aliases),
        policy=spec.policy,
        on_unmapped_route_key=spec.on_unmapped_route_key,
    )


def _routing_spec(entry: RoutingEntry) -> RoutingSpec:
    return RoutingSpec(
        default_model=entry.default_model,
        route_keys=entry.route_keys,
        aliases=entry.aliases,
        policy=entry.policy,
        on_unmapped_route_key=entry.on_unmapped_route_key,
    )


def _told_model(content: RoleContent, model: RoleModel) -> ModelEntry:
    exposed = content.expose_engine_urls
    return ModelEntry(
        state=model.state,
        route_mode=model.route_mode,
        router_url=model.router_url if exposed else None,
        weight_source=model.weight_source,
        weight_version=model.weight_version,
        served_model_name=model.served_model_name,
        engines=tuple(
            _told_engine(replica, exposed and replica.exposed) for replica in model.replicas
        ),
    )


def _told_engine(replica: RoleReplica, exposed: bool) -> EngineEntry:
    return EngineEntry(
        engine_id=replica.engine_id,
        base_url=replica.base_url if exposed else None,
        state=replica.state,
        direct_eligible=exposed and replica.direct_eligible,
        generation=replica.generation,
        worker_type=replica.worker_type,
        weight_version=replica.weight_version,
        blocked=replica.blocked,
        # Why may tell where.
        detail=replica.detail if exposed and replica.detail else msgspec.UNSET,
    )


def _internal_model(model: RoleModel) -> InternalModelEntry:
    return InternalModelEntry(
        state=model.state,
        route_mode=model.route_mode,
        router_url=model.router_url,
        weight_source=model.weight_source,
        weight_version=model.weight_version,
        served_model_name=model.served_model_name,
        engines=tuple(_internal_engine(replica) for replica in model.replicas),
        sampling_defaults=dict(model.sampling_defaults),
        chat_template_kwargs=dict(model.chat_template_kwargs),
    )


def _internal_engine(replica: RoleReplica) -> InternalEngineEntry:
    return InternalEngineEntry(
        engine_id=replica.engine_id,
        base_url=replica.base_url,
        state=replica.state,
        direct_eligible=replica.direct_eligible,
        generation=replica.generation,
        worker_type=replica.worker_type,
        weight_version=replica.weight_version,
        detail=replica.detail or msgspec.UNSET,
        blocked=replica.blocked,
        exposed=replica.exposed,
    )


def _model(name: str, entry: ModelEntry, document: DiscoveryDocument) -> RoleModel:
    route_mode = entry.route_mode
    if route_mode is None:
        route_mode = RouteMode.DIRECT if entry.router_url is None else RouteMode.SGLANG_ROUTER
    requests = entry if isinstance(entry, InternalModelEntry) else None
    return RoleModel(
        name=name,
        state=_state(entry.state, f"model {name!r}"),
        route_mode=route_mode,
        router_url=entry.router_url,
        replicas=tuple(_replica(engine, document) for engine in entry.engines),
        served_model_name=entry.served_model_name,
        weight_source=entry.weight_source,
        weight_version=entry.weight_version,
        sampling_defaults={} if requests is None else requests.sampling_defaults,
        chat_template_kwargs={} if requests is None else requests.chat_template_kwargs,
    )


def _replica(entry: EngineEntry, document: DiscoveryDocument) -> RoleReplica:
    inside = entry if isinstance(entry, InternalEngineEntry) else None
    replica = RoleReplica(
        engine_id=entry.engine_id,
        base_url=entry.base_url,
        state=_state(entry.state, f"engine {entry.engine_id!r}"),
        generation=entry.generation,
        worker_type=entry.worker_type,
        exposed=document.expose_engine_urls if inside is None else inside.exposed,
        weight_version=entry.weight_version,
        detail="" if entry.detail is msgspec.UNSET else entry.detail,
        blocked=entry.blocked,
    )
    if inside is None and replica.direct_eligible and not entry.direct_eligible:
        return replace(replica, exposed=False)  # whoever publishes it knows why
    return replica


def _state(told: str, of: str) -> ReplicaState:
    try:
        return ReplicaState(told)
    except ValueError:
        raise MalformedRequestError(
            f"{of} is in state {told!r}; known: {', '.join(ReplicaState)}"
        ) from None
