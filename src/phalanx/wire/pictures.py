"""Arrays that peers send as images and states, in the forms of an `Observation`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import numpy as np
from numpy.typing import NDArray

from phalanx.errors import InvalidRequestError

MAX_IMAGES = 64
"""Cameras of one request, or views of one robot."""
MAX_ROWS = 4096
"""Observations of one request: what is made for each is larger than an observation can be."""

_CHANNELS = (1, 3, 4)


def as_image(array: NDArray[np.generic], name: str) -> NDArray[np.uint8]:
    """uint8 of shape (..., H, W, C).

    Floats from 0 to 1 are scaled to 255 and cut; channels that come first are moved behind, where
    only the first dimension can be the channels. Raises `InvalidRequestError` for anything else.
    """
    if array.dtype.kind == "f":
        array = _scaled(cast(NDArray[np.floating], array), name)
    if array.dtype != np.uint8:
        raise InvalidRequestError(
            f"image {name!r} is {array.dtype}; send uint8, or floats from 0 to 1", field=name
        )
    image = cast(NDArray[np.uint8], array)
    if image.ndim < 3 or image.shape[-1] in _CHANNELS or image.shape[-3] not in _CHANNELS:
        return image
    return np.moveaxis(image, -3, -1)


def _scaled(array: NDArray[np.floating], name: str) -> NDArray[np.uint8]:
    # A comparison with NaN is false, so that NaN is refused as well.
    if array.size and not (array.min() >= 0 and array.max() <= 1):
        raise InvalidRequestError(
            f"image {name!r} is {array.dtype} and not within 0 to 1; send uint8, or floats from 0 "
            "to 1",
            field=name,
        )
    return (255 * array).astype(np.uint8)


def num_rows(
    images: Mapping[str, NDArray[np.uint8]], state: NDArray[np.float32] | None
) -> int | None:
    """The rows of a batch, by the first array that has a dimension for them; None for no batch.

    Raises `InvalidRequestError` for more than `MAX_ROWS`.
    """
    rows, name = None, "state"
    if state is not None and state.ndim == 2:
        rows = len(state)
    for image_name, image in images.items():
        if image.ndim == 4:
            rows, name = len(image), image_name
            break
    if rows is not None and rows > MAX_ROWS:
        raise InvalidRequestError(
            f"{name} has {rows} rows; at most {MAX_ROWS} observations are taken in one request",
            field=name,
        )
    return rows


def as_state(value: object, name: str) -> NDArray[np.float32]:
    """float32 of the same shape. Raises `InvalidRequestError` where these are not numbers."""
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise InvalidRequestError(f"{name} is no array: {error}", field=name) from error
    if array.dtype.kind not in "iuf":
        raise InvalidRequestError(f"{name} is {array.dtype}; send numbers", field=name)
    # What does not fit becomes infinite, which the observation refuses.
    with np.errstate(over="ignore"):
        return array.astype(np.float32, copy=False)
