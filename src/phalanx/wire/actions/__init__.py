"""`POST /v1/actions/generations`: a batch of observations as MessagePack, in two envelopes."""

from phalanx.wire.actions.errors import error_body
from phalanx.wire.actions.request import MEDIA_TYPES, ActionsCall, Envelope, decode_actions_request
from phalanx.wire.actions.response import encode_actions_response

__all__ = [
    "MEDIA_TYPES",
    "ActionsCall",
    "Envelope",
    "decode_actions_request",
    "encode_actions_response",
    "error_body",
]
