"""The messages of `robot.inference.v1`: their classes, and what mypy should know of them."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, MutableSequence
from dataclasses import dataclass
from functools import cache
from typing import Generic, Protocol, TypeVar, cast

from google.protobuf.message import Message

from phalanx.wire.protobuf import Form, message_classes, parse

T = TypeVar("T")

PACKAGE = "robot.inference.v1"


class TensorMessage(Protocol):
    data: bytes
    shape: MutableSequence[int]
    dtype: int


class ImageMessage(Protocol):
    name: str
    data: bytes
    shape: MutableSequence[int]
    dtype: int
    encoding: int
    layout: int


class ImageList(Protocol):
    """A repeated field."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> ImageMessage: ...

    def add(self) -> ImageMessage: ...


class Encodable(Protocol):
    def SerializeToString(self) -> bytes: ...

    def HasField(self, field_name: str) -> bool: ...


class RequestMessage(Encodable, Protocol):
    request_id: str
    timestamp_ns: int
    instruction: str
    requested_action_horizon: int
    extensions_json: str
    model_name: str

    @property
    def images(self) -> ImageList: ...

    @property
    def robot_state(self) -> TensorMessage: ...

    @property
    def inputs(self) -> MutableMapping[str, TensorMessage]: ...


class ResponseMessage(Encodable, Protocol):
    request_id: str
    inference_time_us: int
    extensions_json: str

    @property
    def actions(self) -> TensorMessage: ...

    @property
    def outputs(self) -> MutableMapping[str, TensorMessage]: ...


class HealthRequestMessage(Encodable, Protocol):
    model_name: str


class HealthResponseMessage(Encodable, Protocol):
    healthy: bool


class RegisterRequestMessage(Encodable, Protocol):
    endpoint: str
    model_name: str


class RegisterResponseMessage(Encodable, Protocol):
    accepted: bool
    server_id: str
    heartbeat_interval_seconds: float
    message: str


class HeartbeatRequestMessage(Encodable, Protocol):
    server_id: str


class HeartbeatResponseMessage(Encodable, Protocol):
    registered: bool
    message: str


class SensorMessage(Encodable, Protocol):
    timestamp_ns: int
    instruction: str
    joint_state: MutableSequence[float]

    @property
    def images(self) -> ImageList: ...


class CommandMessage(Encodable, Protocol):
    timestamp_ns: int
    actions: MutableSequence[float]
    horizon: int
    action_dim: int


@cache
def _classes() -> Mapping[str, type[Message]]:
    return message_classes(__package__)


_FLAT = Form({})


@dataclass(frozen=True)
class MessageType(Generic[T]):
    """Makes and decodes the messages of one type; `form` says what is counted before decoding."""

    name: str
    form: Form = _FLAT

    def new(self) -> T:
        return cast(T, self._cls())

    def parse(self, data: bytes) -> T:
        """Raises `MalformedRequestError` where `data` is no such message."""
        return cast(T, parse(self._cls, data, self.form))

    @property
    def _cls(self) -> type[Message]:
        return _classes()[f"{PACKAGE}.{self.name}"]


_TENSOR = Form({}, short=frozenset({2}))
_IMAGE = Form({}, short=frozenset({3}))
_NAMED_TENSOR = Form({2: _TENSOR})

REQUEST = MessageType[RequestMessage](
    "InferenceRequest", Form({3: _IMAGE, 4: _TENSOR, 9: _NAMED_TENSOR})
)
RESPONSE = MessageType[ResponseMessage]("InferenceResponse", Form({2: _TENSOR, 5: _NAMED_TENSOR}))
HEALTH_REQUEST = MessageType[HealthRequestMessage]("HealthRequest")
HEALTH_RESPONSE = MessageType[HealthResponseMessage]("HealthResponse")
REGISTER_REQUEST = MessageType[RegisterRequestMessage]("RegisterRequest")
REGISTER_RESPONSE = MessageType[RegisterResponseMessage]("RegisterResponse")
HEARTBEAT_REQUEST = MessageType[HeartbeatRequestMessage]("HeartbeatRequest")
HEARTBEAT_RESPONSE = MessageType[HeartbeatResponseMessage]("HeartbeatResponse")
SENSOR_DATA = MessageType[SensorMessage]("SensorData", Form({2: _IMAGE}))
ACTION_COMMAND = MessageType[CommandMessage]("ActionCmd")
