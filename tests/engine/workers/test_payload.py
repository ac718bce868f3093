"""Objects survive the way through bytes: values, memory of their own, and clear refusals."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import threading

import hypothesis.extra.numpy as hnp
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.engine.workers.payload import MIN_BUFFER_BYTES, decode, encode, encode_request
from phalanx.errors import InvalidRequestError

NUMBERS = "?bhilqBHILQefdgFDG"
DTYPES = [
    *NUMBERS,
    ">i4",
    ">f8",
    "U5",
    "S5",
    "V3",
    "M8[ns]",
    "m8[s]",
    "O",
    np.dtype([("a", "<f4"), ("b", "i2", (3,))]),
]


def through_bytes(obj):
    """Decode from memory that is overwritten before anybody looks at the result."""
    encoded = encode(obj)
    body = bytearray(b"".join(encoded.chunks))
    assert len(body) == encoded.num_bytes
    decoded = decode(memoryview(body), encoded.sizes)
    body[:] = b"\xff" * len(body)
    return decoded


def same(left, right):
    assert left.dtype == right.dtype
    assert left.shape == right.shape
    np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("length", [3, 40_000], ids=["small", "large"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_arrays_of_every_dtype_arrive(dtype, length):
    array = (np.arange(length) % 100).astype("i8").astype("S2" if dtype == "S5" else "i8")
    array = np.zeros(length, dtype) if str(dtype).startswith(("V", "[")) else array.astype(dtype)
    same(array, through_bytes(array))


@pytest.mark.parametrize(
    "view",
    [
        lambda a: a,
        lambda a: a[::2],
        lambda a: a[:, ::-1],
        lambda a: a.T,
        lambda a: a.transpose(1, 0, 2),
        lambda a: a[0, 0, 0],
        lambda a: a[:0],
        lambda a: a[:, :0],
        lambda a: np.broadcast_to(a[:1], a.shape),
        lambda a: np.asfortranarray(a),
        lambda a: np.array(a[1, 1, 1]),
        lambda a: a[1:, 2:, :1],
    ],
)
@pytest.mark.parametrize("dtype", ["u1", "f4", "O"])
def test_views_arrive_whatever_their_strides(view, dtype):
    array = view((np.arange(60 * 50 * 8) % 256).reshape(60, 50, 8).astype(dtype))
    arrived = through_bytes(array)
    same(np.asarray(array), np.asarray(arrived))


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(list(NUMBERS)).flatmap(
        lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, min_side=0, max_side=6))
    )
)
def test_any_array_arrives(array):
    same(array, through_bytes(array))


@pytest.mark.parametrize("num_bytes", [16, 5_000_000])
def test_an_arrived_array_is_writable_and_its_memory_is_its_own(num_bytes):
    array = np.arange(num_bytes, dtype=np.uint8)
    arrived = through_bytes({"a": array, "b": [array]})
    assert arrived["a"] is arrived["b"][0]
    arrived["a"][:] = 0
    assert array[1] == 1


def test_a_read_only_array_stays_read_only():
    array = np.arange(100_000)
    array.flags.writeable = False
    assert not through_bytes(array).flags.writeable


def test_large_buffers_stand_beside_the_pickle_without_being_copied():
    array = np.zeros(MIN_BUFFER_BYTES, np.uint8)
    encoded = encode([array, np.zeros(MIN_BUFFER_BYTES - 1, np.uint8)])
    assert encoded.sizes[1:] == (MIN_BUFFER_BYTES,)
    assert np.shares_memory(np.frombuffer(encoded.chunks[-1], np.uint8), array)
    # One whose elements do not lie together is copied once, not into the pickle.
    encoded = encode(np.zeros((300, 300), np.uint8)[:, ::2])
    assert encoded.sizes[1:] == (300 * 150,)


@pytest.mark.parametrize(
    "text",
    [
        b"x" * 1_000_000,
        "\u00e4\u4e2d" * 500_000,
        bytearray(b"y") * 1_000_000,
        [b"a" * 70_000, "b" * 70_000],
    ],
    ids=["bytes", "str", "bytearray", "both"],
)
def test_long_byte_strings_and_texts_arrive(text):
    assert through_bytes(text) == text


@dataclasses.dataclass
class Observation:
    images: list[np.ndarray]
    state: np.ndarray
    prompt: str


class Prompt(msgspec.Struct):
    ids: list[int]
    extra: object = None


def test_a_dataclass_with_several_arrays_arrives():
    images = [np.full((64, 64, 3), i, np.uint8) for i in range(3)]
    sent = Observation(images, np.linspace(0, 1, 7), "lift")
    arrived = through_bytes(sent)
    assert type(arrived) is Observation and arrived.prompt == "lift"
    for left, right in zip([*images, sent.state], [*arrived.images, arrived.state], strict=True):
        same(left, right)


class Rebellious:
    def __reduce__(self):
        raise LookupError("not today")


def test_a_request_that_cannot_be_pickled_is_refused_naming_the_part():
    lock = threading.Lock()
    circle = [1]
    circle.append(circle)
    for request, field, words in [
        ({"a": [1, lock]}, "a.1", "'_thread.lock'"),
        (Prompt([1], extra={"hook": lambda: 0}), "extra.hook", "lambda"),
        (Observation([], lock, "x"), "state", "'_thread.lock'"),
        ((1, Rebellious()), "1", "not today"),
        (Rebellious(), "", "not today"),
    ]:
        with pytest.raises(InvalidRequestError) as caught:
            encode_request(request, 1)
        assert caught.value.field == field
        assert words in str(caught.value)
        assert ".".join(filter(None, ["request", field])) in str(caught.value)
    assert through_bytes(circle)[1][0] == 1
    with pytest.raises(InvalidRequestError, match="lock"):
        encode_request([circle, lock, circle], 1)


def test_a_circle_that_cannot_be_pickled_is_refused_too():
    circle = [threading.Lock()]
    circle.insert(0, circle)
    with pytest.raises(InvalidRequestError, match="lock"):
        encode_request(circle, 1)


def test_no_torch_is_imported_where_no_tensor_travels():
    program = (
        "import sys, numpy as np\n"
        "from phalanx.engine.workers.channel import connect, open_replica\n"
        "link = open_replica(1)\n"
        "worker = connect(link.endpoints[0])\n"
        "link.sender.submit(1, 'a', {'x': np.zeros(100_000), 'y': 'z'})\n"
        "assert worker.receive()[1]['y'] == 'z'\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
