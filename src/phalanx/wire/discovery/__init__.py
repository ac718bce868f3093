"""Discovery of a role: which models and engines it has, as JSON, and how a role's refusals read."""

from phalanx.wire.discovery.document import (
    MAX_DOCUMENT_BYTES,
    DiscoveryDocument,
    EngineEntry,
    InternalDocument,
    InternalEngineEntry,
    InternalModelEntry,
    ModelEntry,
    RoutingEntry,
    decode_discovery,
    decode_internal,
    encode_document,
)
from phalanx.wire.discovery.refusal import refusal_body, refusal_of, refusal_status

__all__ = [
    "MAX_DOCUMENT_BYTES",
    "DiscoveryDocument",
    "EngineEntry",
    "InternalDocument",
    "InternalEngineEntry",
    "InternalModelEntry",
    "ModelEntry",
    "RoutingEntry",
    "decode_discovery",
    "decode_internal",
    "encode_document",
    "refusal_body",
    "refusal_of",
    "refusal_status",
]
