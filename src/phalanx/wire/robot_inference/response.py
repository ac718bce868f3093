"""`InferenceResponse` to `Actions` and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from phalanx.errors import MalformedRequestError
from phalanx.schema.observation import Actions
from phalanx.wire.robot_inference.messages import RESPONSE
from phalanx.wire.robot_inference.tensors import decode_tensor, encode_tensor


@dataclass(frozen=True, eq=False)
class InferenceAnswer:
    """What a policy answered, and how long the server took for it."""

    request_id: str
    actions: Actions
    inference_time_us: int = 0
    extensions: Mapping[str, object] = field(default_factory=dict)


def encode_response(answer: InferenceAnswer) -> bytes:
    """The message. Raises `InvalidRequestError` for an output of a dtype that it cannot carry."""
    message = RESPONSE.new()
    message.request_id = answer.request_id
    message.inference_time_us = answer.inference_time_us
    encode_tensor(answer.actions.values, message.actions, "actions")
    for name, array in answer.actions.outputs.items():
        encode_tensor(array, message.outputs[name], f"output {name!r}")
    if answer.extensions:
        message.extensions_json = msgspec.json.encode(answer.extensions).decode()
    return message.SerializeToString()


def decode_response(data: bytes) -> InferenceAnswer:
    """The answer; its arrays are read-only views of the message.

    Raises `MalformedRequestError` or `InvalidRequestError` for a peer that answers something else.
    """
    message = RESPONSE.parse(data)
    values = decode_tensor(message.actions, "actions")
    if values.dtype != np.float32 or values.ndim not in (2, 3):
        raise MalformedRequestError(
            f"the actions are {values.dtype} of shape {values.shape}, not float32 of (horizon, "
            "action_dim) or (B, horizon, action_dim)",
            field="actions",
        )
    outputs = {
        name: decode_tensor(message.outputs[name], f"output {name!r}") for name in message.outputs
    }
    return InferenceAnswer(
        message.request_id,
        Actions(cast(NDArray[np.float32], values), outputs),
        message.inference_time_us,
        _extensions(message.extensions_json),
    )


def _extensions(text: str) -> Mapping[str, object]:
    if not text:
        return {}
    try:
        return msgspec.json.decode(text, type=dict[str, object])
    except (msgspec.DecodeError, RecursionError) as error:
        raise MalformedRequestError(
            f"extensions_json is not a JSON object: {error}", field="extensions_json"
        ) from error
