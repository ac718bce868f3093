"""Whom a message is for and which request it belongs to, without decoding what it carries."""

from __future__ import annotations

from typing import NamedTuple

from phalanx.wire.protobuf import head_texts

_REQUEST_ID, _MODEL_NAME = 1, 8


class RequestHead(NamedTuple):
    """Both are "" where the request does not say."""

    request_id: str
    model_name: str


def peek(data: bytes) -> RequestHead:
    """The head of an `InferenceRequest`. Raises `MalformedRequestError` where it is not a message."""
    texts = head_texts(data, (_REQUEST_ID, _MODEL_NAME))
    return RequestHead(texts[_REQUEST_ID], texts[_MODEL_NAME])


def peek_response(data: bytes) -> str:
    """The request id of an `InferenceResponse`."""
    return head_texts(data, (_REQUEST_ID,))[_REQUEST_ID]
