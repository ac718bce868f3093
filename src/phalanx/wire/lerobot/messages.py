"""The four messages of LeRobot's service `transport.AsyncInference`, by hand: each has at most a
number and some bytes, and a compiled copy would clash with LeRobot's own in one process.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from phalanx.errors import MalformedRequestError
from phalanx.wire.protobuf import BYTES, VARINT, fields

SERVICE = "transport.AsyncInference"
READY = f"/{SERVICE}/Ready"
SEND_POLICY_INSTRUCTIONS = f"/{SERVICE}/SendPolicyInstructions"
SEND_OBSERVATIONS = f"/{SERVICE}/SendObservations"
GET_ACTIONS = f"/{SERVICE}/GetActions"

EMPTY = b""
MAX_MESSAGE_BYTES = 4 * 1024 * 1024
"""The largest message that LeRobot's client sends or takes."""

_MAX_FIELDS = 16


class TransferState(IntEnum):
    """Where in an upload a message stands; a payload that fits in one message is a single END."""

    UNKNOWN = 0
    BEGIN = 1
    MIDDLE = 2
    END = 3


class UploadPart(NamedTuple):
    """One message of `SendObservations`."""

    state: int
    data: memoryview


def decode_upload_part(message: bytes) -> UploadPart:
    """`Observation{transfer_state=1, data=2}`. Raises `MalformedRequestError`.

    The data is a view, which holds the whole message, unless that is mostly something else.
    """
    state, data = 0, memoryview(b"")
    for count, field in enumerate(fields(message)):
        _check_count(count)
        if field.number == 1 and field.wire_type == VARINT:
            state = _number(message[field.start : field.end])
        elif field.number == 2 and field.wire_type == BYTES:
            data = memoryview(message)[field.start : field.end]
    if 2 * len(data) < len(message):
        data = memoryview(bytes(data))
    return UploadPart(state, data)


def encode_upload_part(state: TransferState, data: bytes) -> bytes:
    return b"\x08" + _varint(state) + b"\x12" + _varint(len(data)) + data


def decode_data(message: bytes) -> bytes:
    """`PolicySetup{data=1}` or `Actions{data=1}`. Raises `MalformedRequestError`."""
    data = b""
    for count, field in enumerate(fields(message)):
        _check_count(count)
        if field.number == 1 and field.wire_type == BYTES:
            data = message[field.start : field.end]
    return data


def encode_data(data: bytes) -> bytes:
    """No data is an empty message, which is how the server says that there are no actions."""
    return b"\x0a" + _varint(len(data)) + data if data else EMPTY


def _check_count(count: int) -> None:
    if count >= _MAX_FIELDS:
        raise MalformedRequestError(f"the message has more than {_MAX_FIELDS} fields")


def _number(encoded: bytes) -> int:
    return sum((byte & 0x7F) << (7 * index) for index, byte in enumerate(encoded))


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
