"""Tensors in a plain pickle: those of plain numbers are read, nothing else is done."""

import base64
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import InvalidRequestError, MalformedRequestError
from phalanx.wire.sglang.named_tensors import check_tensor_format, decoded_part, unpickled

NAMED = [("a.weight", torch.arange(6.0).reshape(2, 3)), ("b", torch.ones(2, dtype=torch.bfloat16))]


@pytest.mark.parametrize("protocol", [3, 4, 5])
@pytest.mark.parametrize("form", [list, tuple, dict])
def test_names_and_numbers(form, protocol):
    arrays = unpickled(pickle.dumps(form(NAMED), protocol=protocol))
    assert list(arrays) == ["a.weight", "b"]
    np.testing.assert_array_equal(arrays["a.weight"], NAMED[0][1].numpy())
    np.testing.assert_array_equal(arrays["b"], [1.0, 1.0])


def test_views_of_one_storage_and_transposed_ones():
    whole = torch.arange(6.0).reshape(2, 3)
    arrays = unpickled(pickle.dumps([("t", whole.T), ("row", whole[1])]))
    np.testing.assert_array_equal(arrays["t"], whole.T.numpy())
    np.testing.assert_array_equal(arrays["row"], [3.0, 4.0, 5.0])


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([("a", 1)], "no list of"),
        ([("a", torch.ones(1), 2)], "no list of"),
        ("text", "no list of"),
        (5, "no list of"),
        ([("a", torch.ones(1)), ("a", torch.ones(1))], "'a' twice"),
        ([("a", print)], "not allowed"),
        ([("a", torch.nn.Parameter(torch.ones(1)))], "not allowed"),
    ],
)
def test_anything_else_is_refused(value, words):
    with pytest.raises(InvalidRequestError, match=words):
        unpickled(pickle.dumps(value))


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data):
    try:
        unpickled(data)
    except InvalidRequestError:
        pass


@given(st.integers(0, 400), st.binary(min_size=1, max_size=4))
def test_a_pickle_with_other_bytes_in_it_is_read_or_refused(at, other):
    data = pickle.dumps(NAMED)
    at %= len(data)
    try:
        unpickled(data[:at] + other + data[at + len(other) :])
    except InvalidRequestError:
        pass


def test_parts_and_formats():
    parts = [base64.b64encode(b"one").decode(), base64.b64encode(b"two").decode()]
    assert decoded_part(parts[:1], 2) == decoded_part(parts, 2) == b"one"
    with pytest.raises(InvalidRequestError, match="2 entries; give one, or one for each of 4"):
        decoded_part(parts, 4)
    with pytest.raises(MalformedRequestError, match="not base64"):
        decoded_part(["?"], 1)
    for name in (None, "auto", "direct", "safetensors"):
        check_tensor_format(name)
    with pytest.raises(InvalidRequestError, match="'flattened_bucket' is not read here"):
        check_tensor_format("flattened_bucket")
