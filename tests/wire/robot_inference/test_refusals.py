"""What a peer can get wrong: each is refused in words, before memory is taken for it."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from phalanx.errors import BodyTooLargeError, InvalidRequestError, MalformedRequestError
from phalanx.schema.observation import Observation
from phalanx.wire.robot_inference import (
    InferenceCall,
    decode_request,
    decode_sensor_data,
    encode_request,
    peek,
)
from phalanx.wire.robot_inference.messages import SENSOR_DATA
from tests.wire.fuzzing import taking_at_most
from tests.wire.robot_inference.observations import image, request_message


def no_id(message):
    message.request_id = ""


def short_image(message):
    message.images[0].data = b"\0" * 70


def huge_shape(message):
    message.images[0].shape[:] = (1 << 40, 1 << 40, 3)


def flat_image(message):
    message.images[0].shape[:] = (24, 3)


def float_image(message):
    message.images[0].dtype = 6


def unknown_encoding(message):
    message.images[0].encoding = 9


def unknown_layout(message):
    message.images[0].layout = 7


def twice(message):
    message.images.append(message.images[0])


def nameless(message):
    message.images[0].name = ""


def nan_state(message):
    message.robot_state.data = np.array([0, np.nan], np.float32).tobytes()


def big_state(message):
    message.robot_state.data = np.array([0, 1e300]).tobytes()
    message.robot_state.dtype = 7


def int_state(message):
    message.robot_state.data = np.zeros(2, np.int32).tobytes()
    message.robot_state.dtype = 2


def cubic_state(message):
    message.robot_state.shape[:] = (1, 1, 2)


def untyped_state(message):
    message.robot_state.dtype = 0


def many_dimensions(message):
    message.inputs["x"].shape.extend([1] * 9)
    message.inputs["x"].data = b"\0"
    message.inputs["x"].dtype = 1


def no_bool(message):
    message.inputs["x"].shape.extend([1])
    message.inputs["x"].data = b"\2"
    message.inputs["x"].dtype = 8


def empty_but_huge(message):
    message.inputs["x"].shape.extend([0, 1 << 63, 1 << 63])
    message.inputs["x"].dtype = 1


def empty_but_many_rows(message):
    message.robot_state.shape[:] = (4097, 0)
    message.robot_state.data = b""


def too_many_rows(message):
    del message.images[:]
    message.robot_state.shape[:] = (4097, 1)
    message.robot_state.data = bytes(4 * 4097)


def broken_json(message):
    message.extensions_json = "{"


def deep_json(message):
    message.extensions_json = '{"parameters": {"x": ' + "[" * 100_000 + "]" * 100_000 + "}}"


def unknown_extension(message):
    message.extensions_json = '{"parameter": {}}'


def long_json(message):
    message.extensions_json = '"' + "x" * (1 << 20) + '"'


def both_instructions(message):
    message.instruction = "go"
    message.extensions_json = '{"instructions": ["go"]}'


def rows_that_differ(message):
    message.images[0].shape[:] = (2, 4, 3, 3)
    message.extensions_json = '{"instructions": ["a", "b", "c"]}'


def batch_of_one_image(message):
    message.extensions_json = '{"instructions": ["a"]}'


def no_jpeg(message):
    message.images[0].encoding = 2


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (no_id, "request_id is missing"),
        (short_image, r"image 'base' has 70 bytes; 1 bytes .* \(4, 6, 3\) are 72"),
        (huge_shape, "image 'base' has 72 bytes"),
        (flat_image, r"shape \(24, 3\); a raw image has three dimensions"),
        (float_image, r"data type 6; send uint8"),
        (unknown_encoding, "encoding 9; send RAW"),
        (unknown_layout, "layout 7; send HWC"),
        (twice, "a second image 'base'"),
        (nameless, "image 0 without a name"),
        (nan_state, "the state is not finite at index 1"),
        (big_state, "the state is not finite at index 1"),
        (int_state, "robot_state is int32; send floating-point"),
        (cubic_state, r"the state has shape \(1, 1, 2\)"),
        (untyped_state, "robot_state has data type 0, which is not one of uint8"),
        (many_dimensions, "input 'x' has 9 dimensions"),
        (no_bool, "input 'x' has bytes that are no bool"),
        (empty_but_huge, "input 'x' has shape"),
        (empty_but_many_rows, r"robot_state has shape \(4097, 0\) and no numbers"),
        (too_many_rows, "state has 4097 rows; at most 4096"),
        (broken_json, "extensions_json: the body is not valid JSON"),
        (deep_json, "extensions_json: the body is nested too deeply"),
        (unknown_extension, "unknown field 'parameter'; did you mean 'parameters'"),
        (long_json, "extensions_json has 1048578 characters"),
        (both_instructions, "give one of them"),
        (rows_that_differ, "has 2 rows beside 3 instructions"),
        (batch_of_one_image, r"shape \(4, 6, 3\); send \(B, H, W, C\)"),
        (no_jpeg, "image 'base' is no readable JPEG"),
    ],
)
def test_it_says_what_is_wrong(spoil, words):
    message = request_message()
    decode_request(message.SerializeToString())
    spoil(message)
    with pytest.raises(InvalidRequestError, match=words):
        decode_request(message.SerializeToString())


def png(width: int, height: int, data: bytes = b"") -> bytes:
    """A PNG file whose header says that it is so large."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        checksum = zlib.crc32(kind + body)
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", checksum)

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data)


def saved(mode: str, form: str) -> bytes:
    target = io.BytesIO()
    Image.new(mode, (6, 4), 7).save(target, form)
    return target.getvalue()


@pytest.mark.parametrize(
    ("data", "encoding", "words"),
    [
        (png(60_000, 60_000), 3, "has 60000x60000 pixels"),
        (png(1 << 30, 1 << 30), 3, "has 1073741824x1073741824 pixels"),
        (png(6, 4), 3, "is no readable PNG"),
        (png(6, 4, zlib.compress(b"\0" * 5)), 3, "is no readable PNG"),
        (saved("CMYK", "JPEG"), 2, "colour mode 'CMYK'"),
        (saved("RGB", "JPEG") + b"\xff\xda" * 20, 2, "more than 20 scans"),
        (saved("RGB", "JPEG")[:300], 2, "is no readable JPEG"),
        (saved("RGB", "PNG"), 2, "is no readable JPEG"),
    ],
)
def test_hostile_image_files_are_refused(data, encoding, words):
    message = request_message()
    picture = message.images[0]
    picture.data, picture.encoding = data, encoding
    del picture.shape[:]
    packed = message.SerializeToString()
    with taking_at_most(4_000_000), pytest.raises(InvalidRequestError, match=words):
        decode_request(packed)


def test_a_jpeg_that_is_refined_by_many_scans_is_read():
    message = request_message()
    target = io.BytesIO()
    Image.new("RGB", (6, 4), 7).save(target, "JPEG", progressive=True)
    assert target.getvalue().count(b"\xff\xda") > 5
    message.images[0].data, message.images[0].encoding = target.getvalue(), 2
    assert decode_request(message.SerializeToString()).observation.images["base"].any()


def test_many_image_files_share_one_bound():
    message = request_message()
    del message.images[:]
    target = io.BytesIO()
    Image.new("L", (4096, 2100)).save(target, "PNG")
    for name in ("a", "b"):
        picture = message.images.add()
        picture.name, picture.encoding, picture.data = name, 3, target.getvalue()
    with pytest.raises(InvalidRequestError, match="image 'b' has 4096x2100 pixels"):
        decode_request(message.SerializeToString())


def test_a_declared_shape_must_be_the_files():
    message = request_message()
    message.images[0].encoding = 3
    message.images[0].data = saved("RGB", "PNG")
    decode_request(message.SerializeToString())
    message.images[0].shape[:] = (6, 4, 3)
    with pytest.raises(InvalidRequestError, match=r"declared to be \(6, 4, 3\)"):
        decode_request(message.SerializeToString())


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\xff", "ends within a number"),
        (b"\x0a\xff\xff\xff\xff\x0fabc", "ends within a field"),
        (b"\x0b", "wire type 3"),
        (b"\x0a\x01\xff", "not UTF-8"),
        (b"\x1a\x00" * 10_001, "more than 10000 fields"),
    ],
)
def test_bytes_that_are_no_message_are_refused_by_the_look_and_by_the_decoder(data, words):
    with pytest.raises(MalformedRequestError, match=words):
        peek(data)
    with pytest.raises(MalformedRequestError):
        decode_request(data)


def test_what_would_grow_when_decoded_is_refused_by_its_bytes():
    shape = b"\x12\xe8\x07" + b"\x01" * 1000
    packed = b"\x0a\x01r" + b"\x22" + b"\xeb\x07" + shape
    with pytest.raises(MalformedRequestError, match="a shape of 1000 bytes"):
        decode_request(packed)
    tensor = b"\x10\x01" * 10_001
    unpacked = b"\x0a\x01r" + b"\x22" + b"\xa2\x9c\x01" + tensor
    with pytest.raises(MalformedRequestError, match="more than 10000 fields"):
        decode_request(unpacked)


def test_too_many_cameras_and_a_long_extension_are_refused():
    message = request_message()
    for index in range(64):
        message.images.add().name = f"camera {index}"
    with pytest.raises(InvalidRequestError, match="there are 65 images"):
        decode_request(message.SerializeToString())
    message = request_message()
    long_json(message)
    with pytest.raises(BodyTooLargeError):
        decode_request(message.SerializeToString())


def test_a_raw_image_is_not_copied():
    message = request_message()
    decoded = decode_request(message.SerializeToString()).observation.images["base"]
    assert not decoded.flags.writeable
    np.testing.assert_array_equal(decoded, image())


def test_more_joints_than_a_robot_has_are_refused():
    message = SENSOR_DATA.new()
    message.joint_state.extend([0.0] * 4097)
    with pytest.raises(InvalidRequestError, match="joint_state has 4097 numbers; at most 4096"):
        decode_sensor_data(message.SerializeToString())


def test_parameters_that_no_server_would_take_are_not_sent():
    call = InferenceCall("r-1", "pi05", Observation(parameters={"note": "x" * (1 << 20)}))
    with pytest.raises(BodyTooLargeError, match="extensions_json has 10486.* characters"):
        encode_request(call)
