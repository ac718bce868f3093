"""Health and registration: the small messages between a gateway and its model servers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from phalanx.errors import MalformedRequestError
from phalanx.wire.robot_inference.messages import (
    HEALTH_REQUEST,
    HEALTH_RESPONSE,
    HEARTBEAT_REQUEST,
    HEARTBEAT_RESPONSE,
    REGISTER_REQUEST,
    REGISTER_RESPONSE,
)


@dataclass(frozen=True)
class Registration:
    """A server offers itself: where it is reached, and the model that it serves."""

    endpoint: str
    model_name: str


@dataclass(frozen=True)
class RegistrationAnswer:
    """`message` says why where it is not accepted; `server_id` is "" then."""

    accepted: bool
    server_id: str = ""
    heartbeat_interval_s: float = 0.0
    message: str = ""


@dataclass(frozen=True)
class HeartbeatAnswer:
    """Not `registered`: the gateway does not know the server (any more); register again."""

    registered: bool
    message: str = ""


def encode_health_request(model_name: str) -> bytes:
    message = HEALTH_REQUEST.new()
    message.model_name = model_name
    return message.SerializeToString()


def decode_health_request(data: bytes) -> str:
    """The model's name; "" asks for the server as a whole."""
    return HEALTH_REQUEST.parse(data).model_name


def encode_health_response(healthy: bool) -> bytes:
    message = HEALTH_RESPONSE.new()
    message.healthy = healthy
    return message.SerializeToString()


def decode_health_response(data: bytes) -> bool:
    return HEALTH_RESPONSE.parse(data).healthy


def encode_registration(registration: Registration) -> bytes:
    message = REGISTER_REQUEST.new()
    message.endpoint = registration.endpoint
    message.model_name = registration.model_name
    return message.SerializeToString()


def decode_registration(data: bytes) -> Registration:
    message = REGISTER_REQUEST.parse(data)
    return Registration(message.endpoint, message.model_name)


def encode_registration_answer(answer: RegistrationAnswer) -> bytes:
    message = REGISTER_RESPONSE.new()
    message.accepted = answer.accepted
    message.server_id = answer.server_id
    message.heartbeat_interval_seconds = answer.heartbeat_interval_s
    message.message = answer.message
    return message.SerializeToString()


def decode_registration_answer(data: bytes) -> RegistrationAnswer:
    message = REGISTER_RESPONSE.parse(data)
    interval_s = message.heartbeat_interval_seconds
    if not (math.isfinite(interval_s) and interval_s >= 0) or (message.accepted and not interval_s):
        raise MalformedRequestError(
            f"heartbeat_interval_seconds={interval_s} must be a positive number of seconds",
            field="heartbeat_interval_seconds",
        )
    return RegistrationAnswer(message.accepted, message.server_id, interval_s, message.message)


def encode_heartbeat(server_id: str) -> bytes:
    message = HEARTBEAT_REQUEST.new()
    message.server_id = server_id
    return message.SerializeToString()


def decode_heartbeat(data: bytes) -> str:
    """The server's id."""
    return HEARTBEAT_REQUEST.parse(data).server_id


def encode_heartbeat_answer(answer: HeartbeatAnswer) -> bytes:
    message = HEARTBEAT_RESPONSE.new()
    message.registered = answer.registered
    message.message = answer.message
    return message.SerializeToString()


def decode_heartbeat_answer(data: bytes) -> HeartbeatAnswer:
    message = HEARTBEAT_RESPONSE.parse(data)
    return HeartbeatAnswer(message.registered, message.message)
