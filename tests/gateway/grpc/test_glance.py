"""A glance at a call's messages tells what decoding their heads does."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from phalanx.errors import MalformedRequestError
from phalanx.gateway.grpc.glance import glance, request_head, response_head
from phalanx.wire.robot_inference import peek, peek_response
from tests.gateway.policy_servers import request

WHOLE = request("r-1", images={"base": np.ones((8, 8, 3), np.uint8)})
FIELDS = st.sampled_from(
    [
        b"\x0a\x03r-2",
        b"\x0a\x00",
        b"\x0a\x81\x00x",
        b"\x42\x02mo",
        b"\x42\x01\xff",
        b"\x10\x96\x01",
        b"\x08\x01",
        b"\x1a\xc8\x01" + bytes(200),
        b"\x09" + bytes(8),
        b"\x4d" + bytes(4),
        b"\xf8\x07\x01",
        b"\x0b",
        b"\x42\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
        b"\x10" + b"\xff" * 11,
        b"\x22\x7f",
        WHOLE,
    ]
)


def told(read, given_bytes):
    try:
        return read(given_bytes)
    except MalformedRequestError as error:
        return str(error)


CUTS = st.lists(st.integers(0, 2000), max_size=5)


@given(fields=st.lists(FIELDS, max_size=6), cuts=CUTS)
@settings(deadline=None, max_examples=500)
@example([b"\x1a\xc8\x01" + bytes(200), b"\x42\x02mo"], [100, 150])
@example([b"\x0a\x03r-2", b"\x22\x7f"], [3])
def test_it_is_what_peek_says_of_the_whole_wherever_it_is_cut(fields, cuts):
    data = b"".join(fields)
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    view = memoryview(data)
    pieces = tuple(view[start:end] for start, end in zip(edges, edges[1:], strict=False))
    assert told(request_head, pieces) == told(peek, data)


@given(fields=st.lists(FIELDS | st.sampled_from([b"\x18\xe8\x07", b"\x18\x00"]), max_size=6))
@settings(deadline=None, max_examples=300)
def test_it_is_what_peek_says_of_an_answer(fields):
    data = b"".join(fields)
    assert told(response_head, data) == told(peek_response, data)


def test_a_request_cut_within_its_images_is_not_put_together():
    view, half = memoryview(WHOLE), len(WHOLE) // 2
    assert glance((view[:half], view[half:]), 1, 8) == tuple(peek(WHOLE))
