"""Arrays out of a peer's bytes: dtype, shape and number of bytes are compared before memory is taken."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from phalanx.errors import InvalidRequestError

MAX_DIMENSIONS = 8


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
    try:
        return np.zeros(tuple(shape), dtype)
    except (ValueError, OverflowError) as error:
        raise InvalidRequestError(
            f"{name} has shape {tuple(shape)}: {error}", field=name
        ) from error
