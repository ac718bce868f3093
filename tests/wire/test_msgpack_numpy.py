"""MessagePack with arrays: the bytes of openpi's client, and what is refused before it is built."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from phalanx.errors import InvalidRequestError, MalformedRequestError
from phalanx.wire.msgpack_numpy import pack, unpack
from tests.wire.fuzzing import taking_at_most

# Written by openpi-client 0.1.2.
OBSERVATION = bytes.fromhex(
    "84b16f62736572766174696f6e2f696d61676584c40b5f5f6e6461727261795f5fc3c40464617461c40c0001020304"
    "05060708090a0bc4056474797065a37c7531c405736861706593020203b16f62736572766174696f6e2f7374617465"
    "84c40b5f5f6e6461727261795f5fc3c40464617461c410000000000000e03f000000000000f0bfc4056474797065a3"
    "3c6638c40573686170659102a46761696e83c40d5f5f6e7067656e657269635f5fc3c40464617461cb3ff800000000"
    "0000c4056474797065a33c6634a670726f6d7074a47069636b"
)
TEXT_ARRAY = bytes.fromhex(
    "84c40b5f5f6e6461727261795f5fc3c40464617461c41c7000000069000000630000006b0000002000000075000000"
    "70000000c4056474797065a33c5537c405736861706590"
)
RESULT = bytes.fromhex(
    "83a7616374696f6e7384c40b5f5f6e6461727261795f5fc3c40464617461c410000000000000803f00000040000040"
    "40c4056474797065a33c6634c4057368617065920202ad706f6c6963795f74696d696e6781a8696e6665725f6d73cb"
    "3ff8000000000000ad7365727665725f74696d696e6782a8696e6665725f6d73cb4000000000000000ad707265765f"
    "746f74616c5f6d73cb4008000000000000"
)


def test_what_openpis_client_writes_is_read():
    got = unpack(OBSERVATION)
    np.testing.assert_array_equal(
        got["observation/image"], np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    )
    assert got["observation/state"].tolist() == [0.5, -1.0]
    assert (got["gain"], got["prompt"]) == (1.5, "pick")
    assert unpack(TEXT_ARRAY) == "pick up"
    assert unpack(array("é好".encode("utf-32-be"), ">U1", (2,))) == ["é", "好"]


def test_the_same_bytes_are_written():
    value = {
        "actions": np.arange(4, dtype=np.float32).reshape(2, 2),
        "policy_timing": {"infer_ms": 1.5},
        "server_timing": {"infer_ms": 2.0, "prev_total_ms": 3.0},
    }
    assert pack(value) == RESULT


@pytest.mark.parametrize("dtype", ["?", "u1", "i2", "u8", "f2", "f4", "f8"])
def test_arrays_and_scalars_travel(dtype):
    array = np.array([[1, 0], [1, 1]], dtype)
    got = unpack(pack({"a": array, "s": array[0, 0], "none": array[:0]}))
    assert got["a"].dtype == array.dtype
    np.testing.assert_array_equal(got["a"], array)
    assert got["s"] == 1
    assert got["none"].shape == (0, 2)


def test_big_endian_arrays_become_native():
    got = unpack(pack(np.array([1.5, 2.5], ">f4")))
    assert got.dtype == np.float32
    assert got.tolist() == [1.5, 2.5]


def test_keys_may_be_texts():
    array = {"__ndarray__": True, "data": b"\1\2", "dtype": "|u1", "shape": [2]}
    assert unpack(msgspec.msgpack.encode(array)).tolist() == [1, 2]


def array(data=b"\1\2", dtype="|u1", shape=(2,)):
    return msgspec.msgpack.encode(
        {b"__ndarray__": True, b"data": data, b"dtype": dtype, b"shape": shape}
    )


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (array(shape=(3,)), "has 2 bytes; 1 bytes for each number of shape"),
        (array(shape=(-1, -2)), "negative shape"),
        (array(shape=(2.0,)), "give integers"),
        (array(shape=(1,) * 9), "9 dimensions"),
        (array(shape="2"), "without data"),
        (array(data="text"), "without data"),
        (array(dtype="|O"), "send bool, integers, floats or texts"),
        (array(dtype="|V2"), "send bool, integers"),
        (array(dtype="i4,i4"), "send bool, integers"),
        (array(dtype="<U0", data=b"", shape=(1 << 40,)), "send bool, integers"),
        (array(dtype="<c8"), "send bool, integers"),
        (array(dtype="|b1"), "are no bool"),
        (array(dtype="<U1", data=b"\xff\xff\xff\xff", shape=(1,)), "not Unicode"),
        (array(dtype=">U1", data=b"\0\0\xd8\1", shape=(1,)), "not Unicode"),
        (array(data=b"", shape=(0, 1 << 62, 1 << 62)), "has shape"),
        (array(data=b"", dtype="<U1", shape=(5_000_000, 0)), "and no numbers"),
        (array(dtype="<U1", data=bytes(4 * 20_001), shape=(20_001,)), "at most 20000 are taken"),
        (b"\x81\x01\x01", "keys are texts"),
        (b"\x81\x90\x01", "keys are texts"),
        (msgspec.msgpack.encode({"é" * 129: 1}), "the message has the key .* of more than 256"),
        (msgspec.msgpack.encode({"a": {b"k" * 257: 1}}), "a has the key .* of more than 256"),
        (b"", "ends before its last value"),
        (b"\x01\x02", "goes on for 1 bytes"),
        (b"\xc1", "extension type"),
        (b"\xd6\xff\0\0\0\0", "extension type"),
        (b"\xc9\xff\xff\xff\xff\x01", "extension type"),
        (b"\xc6\xff\xff\xff\xff", "ends within a value"),
        (b"\xdd\xff\xff\xff\xff", "more than 20000 values"),
        (b"\xdf\x00\x01\x00\x00", "more than 20000 values"),
        (b"\x91" * 100_000, "nested deeper than 32"),
        (b"\x81\xa1a" * 100_000, "nested deeper than 32"),
        (b"\xa2\xff\xfe", "not MessagePack"),
    ],
)
def test_a_refused_message_takes_no_memory(message, words):
    with taking_at_most(500_000), pytest.raises(InvalidRequestError, match=words):
        unpack(message)


def test_the_texts_of_all_arrays_are_counted():
    one = msgspec.msgpack.decode(array(dtype="<U1", data=bytes(4 * 10_001), shape=(10_001,)))
    with pytest.raises(InvalidRequestError, match=r"b has 10001 texts; at most 20000 are taken in"):
        unpack(msgspec.msgpack.encode({"a": one, "b": one}))


def test_many_small_values_are_refused_before_they_are_built():
    message = b"\xdd\x00\x0f\x42\x40" + b"\x90" * 1_000_000
    with (
        taking_at_most(100_000),
        pytest.raises(MalformedRequestError, match="more than 20000 values"),
    ):
        unpack(message)


@pytest.mark.parametrize("value", [object(), np.zeros(2, complex), np.array([None]), {"a": {1}}])
def test_values_outside_the_protocol_are_not_written(value):
    if isinstance(value, dict):
        assert pack(value) == pack({"a": [1]})
        return
    with pytest.raises(InvalidRequestError, match="cannot be sent as MessagePack"):
        pack(value)
