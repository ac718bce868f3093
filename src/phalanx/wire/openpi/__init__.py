"""openpi's WebSocket protocol: MessagePack frames with arrays in them."""

from phalanx.wire.openpi.observation import decode_observation
from phalanx.wire.openpi.result import encode_metadata, encode_result

__all__ = ["decode_observation", "encode_metadata", "encode_result"]
