"""Arrays out of a peer's bytes: dtype, shape and number of bytes are compared before memory is taken."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from phalanx.errors import InvalidRequestError

MAX_DIMENSIONS = 8
MAX_EMPTY_NUMBERS = 4096
"""Of an array of no bytes: the product of its sizes, each zero taken as one. Its bytes bound no
size, and what is made for each row or view of an array would follow any.
"""


MAX_LISTED_NUMBERS = 1 << 16
"""Of all arrays among the settings of a request; as lists they take many times the memory."""


def listed(settings: Mapping[str, object]) -> dict[str, object]:
    """Settings with arrays in them as lists, which is what they are everywhere else.

    Raises `InvalidRequestError` for arrays that are too large for that.
    """
    count = _num_numbers(settings)
    if count > MAX_LISTED_NUMBERS:
        raise InvalidRequestError(
            f"arrays of {count} numbers are among the settings; at most {MAX_LISTED_NUMBERS} are "
            "taken there",
            field="parameters",
        )
    return {name: _listed(each) for name, each in settings.items()}


def _num_numbers(value: object) -> int:
    match value:
        case np.ndarray():
            return value.size
        case Mapping():
            return sum(map(_num_numbers, value.values()))
        case list():
            return sum(map(_num_numbers, value))
    return 0


def _listed(value: object) -> object:
    match value:
        case np.ndarray():
            return value.tolist()
        case np.generic():
            return value.item()
        case Mapping():
            return {name: _listed(each) for name, each in value.items()}
        case list():
            return [_listed(each) for each in value]
    return value


def array_of(
    data: bytes, dtype: np.dtype[np.generic], shape: Sequence[int], name: str
) -> NDArray[np.generic]:
    """A read-only view of `data`, in C order; `name` is what an error calls it.

    Raises `InvalidRequestError` where the three do not agree.
    """
    if len(shape) > MAX_DIMENSIONS:
        raise InvalidRequestError(
            f"{name} has {len(shape)} dimensions; at most {MAX_DIMENSIONS} are taken", field=name
        )
    if any(size < 0 for size in shape):
        raise InvalidRequestError(f"{name} has the negative shape {tuple(shape)}", field=name)
    if not all(shape) and math.prod(size or 1 for size in shape) > MAX_EMPTY_NUMBERS:
        raise InvalidRequestError(
            f"{name} has shape {tuple(shape)} and no numbers; leave it out, or send it with the "
            "numbers",
            field=name,
        )
    wanted = math.prod(shape) * dtype.itemsize
    if wanted != len(data):
        raise InvalidRequestError(
            f"{name} has {len(data)} bytes; {dtype.itemsize} bytes for each number of shape "
            f"{tuple(shape)} are {wanted}",
            field=name,
        )
    if dtype.kind == "b" and data.translate(None, b"\0\1"):
        raise InvalidRequestError(f"{name} has bytes that are no bool: neither 0 nor 1", field=name)
    if data:
        return np.frombuffer(data, dtype).reshape(tuple(shape))
    return np.zeros(tuple(shape), dtype)
