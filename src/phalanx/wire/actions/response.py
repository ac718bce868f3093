"""The answer to `POST /v1/actions/generations`, in the envelope of its request."""

from __future__ import annotations

from phalanx.schema.observation import Actions
from phalanx.wire.actions.request import Envelope
from phalanx.wire.msgpack_numpy import pack


def encode_actions_response(actions: Actions, envelope: Envelope) -> bytes:
    """MessagePack with the actions as float32 of shape (B, horizon, action_dim)."""
    values = actions.values if actions.values.ndim == 3 else actions.values[None]
    if envelope is Envelope.FLAT:
        return pack({"actions": values})
    return pack({"data": [{"action": {"values": values}}]})
