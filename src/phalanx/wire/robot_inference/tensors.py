"""`Tensor` messages to numpy arrays and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from phalanx.errors import InvalidRequestError
from phalanx.wire.arrays import array_of
from phalanx.wire.robot_inference.messages import TensorMessage

UNSPECIFIED, UINT8, BFLOAT16, FLOAT32, BOOL = 0, 1, 5, 6, 8

_DTYPES: Mapping[int, str] = {
    UINT8: "|u1",
    2: "<i4",
    3: "<i8",
    4: "<f2",
    BFLOAT16: "<u2",
    FLOAT32: "<f4",
    7: "<f8",
    BOOL: "|b1",
}
_NUMBERS = {np.dtype(name): number for number, name in _DTYPES.items() if number != BFLOAT16}
_NAMES = "uint8, int32, int64, float16, bfloat16, float32, float64, bool"


def decode_tensor(message: TensorMessage, name: str) -> NDArray[np.generic]:
    """The array, read-only; bfloat16 as the float32 of the same value.

    Raises `InvalidRequestError` where dtype, shape and number of bytes do not agree.
    """
    array = decode_array(message.data, message.shape, message.dtype, name)
    if message.dtype != BFLOAT16:
        return array
    return (array.astype(np.uint32) << 16).view(np.float32)


def decode_array(data: bytes, shape: Sequence[int], dtype: int, name: str) -> NDArray[np.generic]:
    """The array of these bytes; `name` is what an error calls it."""
    if dtype not in _DTYPES:
        raise InvalidRequestError(
            f"{name} has data type {dtype}, which is not one of {_NAMES}", field=name
        )
    return array_of(data, np.dtype(_DTYPES[dtype]), shape, name)


def encode_tensor(array: NDArray[np.generic], message: TensorMessage, name: str) -> None:
    """Write `array` into `message`. Raises `InvalidRequestError` for a dtype that it cannot carry."""
    number = _NUMBERS.get(array.dtype.newbyteorder("<"))
    if number is None:
        raise InvalidRequestError(f"{name} is {array.dtype}; send one of {_NAMES}", field=name)
    message.data = array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
    message.shape.extend(array.shape)
    message.dtype = number
