"""LeRobot's asynchronous inference (`transport.AsyncInference`): messages, and pickles without
Python's unpickler.
"""

from phalanx.wire.lerobot.actions import encode_actions
from phalanx.wire.lerobot.features import Camera, Features
from phalanx.wire.lerobot.messages import (
    EMPTY,
    GET_ACTIONS,
    MAX_MESSAGE_BYTES,
    READY,
    SEND_OBSERVATIONS,
    SEND_POLICY_INSTRUCTIONS,
    SERVICE,
    TransferState,
    UploadPart,
    decode_data,
    decode_upload_part,
    encode_data,
    encode_upload_part,
)
from phalanx.wire.lerobot.observation import blank_observation, to_observation
from phalanx.wire.lerobot.records import (
    PolicyInstructions,
    TimedAction,
    TimedObservation,
    decode_actions,
    decode_observation,
    decode_policy_instructions,
)
from phalanx.wire.lerobot.upload import DEFAULT_MAX_BYTES, Upload

__all__ = [
    "DEFAULT_MAX_BYTES",
    "EMPTY",
    "GET_ACTIONS",
    "MAX_MESSAGE_BYTES",
    "READY",
    "SEND_OBSERVATIONS",
    "SEND_POLICY_INSTRUCTIONS",
    "SERVICE",
    "Camera",
    "Features",
    "PolicyInstructions",
    "TimedAction",
    "TimedObservation",
    "TransferState",
    "Upload",
    "UploadPart",
    "blank_observation",
    "decode_actions",
    "decode_data",
    "decode_observation",
    "decode_policy_instructions",
    "decode_upload_part",
    "encode_actions",
    "encode_data",
    "encode_upload_part",
    "to_observation",
]
