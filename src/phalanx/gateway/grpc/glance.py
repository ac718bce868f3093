"""`peek` and `peek_response` for each call: in one pass, and for a request that came in pieces without
putting them together, which would copy all of its images for the sake of two names.
"""

from __future__ import annotations

from phalanx.gateway.grpc.message_reader import Pieces
from phalanx.wire.protobuf import BYTES, MAX_FIELDS, VARINT
from phalanx.wire.robot_inference import RequestHead, ResponseHead, peek, peek_response

_REQUEST_ID, _INFERENCE_TIME_US, _MODEL_NAME = 1, 3, 8
_MAX_FIELD = 15
"""The highest number that a key of one byte has."""
_MAX_SHIFT = 56
"""Of the last byte of a number, but for those that are longer than any length."""


def request_head(pieces: Pieces) -> RequestHead:
    """The head of an `InferenceRequest`, as `peek` gives it, which also words what is wrong."""
    found = glance(pieces, _REQUEST_ID, _MODEL_NAME)
    if found is not None:
        request_id, model_name = found
        if not (isinstance(request_id, int) or isinstance(model_name, int)):
            return RequestHead(request_id, model_name)
    return peek(b"".join(pieces))


def response_head(data: bytes) -> ResponseHead:
    """The head of an `InferenceResponse`, as `peek_response` gives it."""
    found = glance((data,), _REQUEST_ID, _INFERENCE_TIME_US)
    if found is not None:
        request_id, time_us = found
        if isinstance(request_id, str) and (isinstance(time_us, int) or not time_us):
            return ResponseHead(request_id, time_us or 0)
    return peek_response(data)


def glance(pieces: Pieces, first: int, second: int) -> tuple[str | int, str | int] | None:
    """The values of two fields, "" for one that is not there. None where one of them, or a key or
    length, lies in two pieces, and for all that is not plain.
    """
    values: dict[int, str | int] = {first: "", second: ""}
    num_fields = at = 0
    try:
        for piece in pieces:
            end = len(piece)
            while at < end:
                number, wire_type = piece[at] >> 3, piece[at] & 7
                num_fields += 1
                if number > _MAX_FIELD or num_fields > MAX_FIELDS:
                    return None
                value, at = _number(piece, at + 1)
                if wire_type == BYTES:
                    start, at = at, at + value
                    if number in values:
                        if at > end:
                            return None
                        values[number] = str(piece[start:at], "utf-8")
                elif wire_type != VARINT:
                    return None
                elif number in values:
                    values[number] = value
            at -= end
    except (IndexError, UnicodeDecodeError):
        return None
    # What is left would be a field within which the message ends.
    return None if at else (values[first], values[second])


def _number(piece: bytes | memoryview, at: int) -> tuple[int, int]:
    """The number that begins at `at`, and where it ends. Raises `IndexError` where it does not."""
    value = shift = 0
    while (byte := piece[at]) >= 0x80 and shift < _MAX_SHIFT:
        value |= (byte & 0x7F) << shift
        shift += 7
        at += 1
    if byte >= 0x80:
        raise IndexError("it is too long")
    return value | byte << shift, at + 1
