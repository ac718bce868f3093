"""Whom a message is for and which request it belongs to, without decoding what it carries."""

from __future__ import annotations

from typing import NamedTuple

from phalanx.wire.protobuf import head_fields, number_of, text_of

_REQUEST_ID, _INFERENCE_TIME_US, _MODEL_NAME = 1, 3, 8


class RequestHead(NamedTuple):
    """Both are "" where the request does not say."""

    request_id: str
    model_name: str


class ResponseHead(NamedTuple):
    """The time is 0 where the server does not say."""

    request_id: str
    inference_time_us: int


def peek(data: bytes) -> RequestHead:
    """The head of an `InferenceRequest`. Raises `MalformedRequestError` where it is not a message."""
    found = head_fields(data, (_REQUEST_ID, _MODEL_NAME))
    return RequestHead(text_of(data, found.get(_REQUEST_ID)), text_of(data, found.get(_MODEL_NAME)))


def peek_response(data: bytes) -> ResponseHead:
    """The head of an `InferenceResponse`."""
    found = head_fields(data, (_REQUEST_ID, _INFERENCE_TIME_US))
    return ResponseHead(
        text_of(data, found.get(_REQUEST_ID)), number_of(data, found.get(_INFERENCE_TIME_US))
    )
