"""The discovery document of a role, and the internal one that a gateway follows.

Fields that a reader does not know are left aside, and all but the role's name may be missing, so
that documents may grow. States are in lower case.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import msgspec

from phalanx.errors import MalformedRequestError
from phalanx.schema.roles import (
    RouteMode,
    RoutingPolicy,
    UnmappedRouteKey,
    WeightSource,
    WorkerType,
    WorkloadType,
)

MAX_DOCUMENT_BYTES = 64 * 1024 * 1024


class RoutingEntry(msgspec.Struct, frozen=True, kw_only=True):
    """How a request finds its model: the same for the gateway and for direct clients."""

    default_model: str | None = None
    route_keys: dict[str, str] = {}
    aliases: dict[str, str] = {}
    policy: RoutingPolicy = RoutingPolicy.LEAST_IN_FLIGHT
    on_unmapped_route_key: UnmappedRouteKey = UnmappedRouteKey.REFUSE


class EngineEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One logical replica. `base_url` is its head's, null where clients are not told.

    `generation` grows when a new process takes its place. `detail` says why it gets no requests;
    `blocked` that nobody is certain what it holds.
    """

    engine_id: str
    base_url: str | None = None
    state: str
    direct_eligible: bool = False
    generation: int = 0
    worker_type: WorkerType = WorkerType.REGULAR
    weight_version: str | None = None
    blocked: bool = False
    detail: str | msgspec.UnsetType = msgspec.UNSET


class InternalEngineEntry(EngineEntry, frozen=True, kw_only=True):
    """`base_url` is always the real one; `exposed` says whether clients are told."""

    exposed: bool = True


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One model. `route_mode` null: by its router where it has one, else direct.

    `served_model_name` is what its engines call it, empty for the model's own name.
    """

    state: str
    route_mode: RouteMode | None = None
    router_url: str | None = None
    weight_source: WeightSource = WeightSource.STATIC
    weight_version: str | None = None
    served_model_name: str = ""
    engines: tuple[EngineEntry, ...] = ()


class InternalModelEntry(ModelEntry, frozen=True, kw_only=True):
    """With what a gateway needs that itself makes requests of a caller's messages."""

    engines: tuple[InternalEngineEntry, ...] = ()
    sampling_defaults: dict[str, object] = {}
    chat_template_kwargs: dict[str, object] = {}


class DiscoveryDocument(msgspec.Struct, frozen=True, kw_only=True):
    """What anybody is told who may ask.

    Within one `registry_epoch` the `topology_revision` grows with every change, and never goes
    back; revisions of different epochs cannot be compared. `stale` says why nothing newer is known,
    where who publishes the role is not heard.
    """

    role: str
    registry_epoch: str = ""
    topology_revision: int = 0
    phase: str | None = None
    workload: WorkloadType = WorkloadType.ROLLOUT
    expose_engine_urls: bool = True
    routing: RoutingEntry = RoutingEntry()
    models: Mapping[str, ModelEntry] = {}
    stale: str | msgspec.UnsetType = msgspec.UNSET


class InternalDocument(DiscoveryDocument, frozen=True, kw_only=True):
    """What a role's own gateway is told: everything."""

    models: Mapping[str, InternalModelEntry] = {}


_discovery = msgspec.json.Decoder(DiscoveryDocument)
_internal = msgspec.json.Decoder(InternalDocument)
DocumentT = TypeVar("DocumentT", DiscoveryDocument, InternalDocument)


def encode_document(document: DiscoveryDocument) -> bytes:
    """The JSON of a discovery or internal document."""
    return msgspec.json.encode(document)


def decode_discovery(body: bytes) -> DiscoveryDocument:
    """Raises `MalformedRequestError` for what is no discovery document."""
    return _decoded(_discovery, body)


def decode_internal(body: bytes) -> InternalDocument:
    """Raises `MalformedRequestError` for what is no internal document."""
    return _decoded(_internal, body)


def _decoded(decoder: msgspec.json.Decoder[DocumentT], body: bytes) -> DocumentT:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedRequestError(f"this is no discovery document: {error}") from error
