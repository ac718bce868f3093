"""`Image` messages to arrays of shape (H, W, C), or (B, H, W, C), and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import numpy as np
from numpy.typing import NDArray

from phalanx.errors import InvalidRequestError
from phalanx.wire.image_files import MAX_PIXELS, Encoding, decode_image, encode_jpeg
from phalanx.wire.pictures import MAX_IMAGES
from phalanx.wire.robot_inference.messages import ImageList, ImageMessage
from phalanx.wire.robot_inference.tensors import UINT8, UNSPECIFIED, decode_array

RAW, JPEG, PNG = 1, 2, 3
HWC, CHW = 1, 2
_FILES: Mapping[int, Encoding] = {JPEG: "jpeg", PNG: "png"}


def decode_images(messages: ImageList) -> dict[str, NDArray[np.uint8]]:
    """The images by name, in the order in which they were sent.

    Raises `InvalidRequestError` naming the camera.
    """
    if len(messages) > MAX_IMAGES:
        raise InvalidRequestError(
            f"there are {len(messages)} images; at most {MAX_IMAGES} are taken", field="images"
        )
    images: dict[str, NDArray[np.uint8]] = {}
    pixels_left = MAX_PIXELS
    for index in range(len(messages)):
        message = messages[index]
        name = message.name
        if not name or name in images:
            problem = f"a second image {name!r}" if name else f"image {index} without a name"
            raise InvalidRequestError(
                f"there is {problem}; give each the name of its camera", field="images"
            )
        images[name] = _decoded(message, pixels_left)
        if message.encoding in _FILES:
            height, width = images[name].shape[:2]
            pixels_left -= height * width
    return images


def _decoded(message: ImageMessage, pixels_left: int) -> NDArray[np.uint8]:
    name = message.name
    if message.dtype not in (UNSPECIFIED, UINT8):
        raise InvalidRequestError(
            f"image {name!r} has data type {message.dtype}; send uint8 ({UINT8})", field=name
        )
    if message.layout not in (UNSPECIFIED, HWC, CHW):
        raise InvalidRequestError(
            f"image {name!r} has layout {message.layout}; send HWC ({HWC}) or CHW ({CHW})",
            field=name,
        )
    if message.encoding in _FILES:
        image = decode_image(message.data, _FILES[message.encoding], name, pixels_left)
        _check_declared(message, image.shape)
        return image
    if message.encoding not in (UNSPECIFIED, RAW):
        raise InvalidRequestError(
            f"image {name!r} has encoding {message.encoding}; send RAW ({RAW}), JPEG ({JPEG}) or "
            f"PNG ({PNG})",
            field=name,
        )
    if len(message.shape) not in (3, 4):
        raise InvalidRequestError(
            f"image {name!r} has shape {tuple(message.shape)}; a raw image has three dimensions, "
            "or four in a batch",
            field=name,
        )
    array = decode_array(message.data, message.shape, UINT8, f"image {name!r}")
    raw = cast(NDArray[np.uint8], array)
    return np.moveaxis(raw, -3, -1) if message.layout == CHW else raw


def _check_declared(message: ImageMessage, shape: tuple[int, ...]) -> None:
    declared = tuple(message.shape)
    height, width, channels = shape
    actual = (channels, height, width) if message.layout == CHW else shape
    if declared and declared != actual:
        raise InvalidRequestError(
            f"image {message.name!r} is declared to be {declared}, but the file has {actual}; "
            "leave the shape out or give the file's",
            field=message.name,
        )


def encode_image(
    name: str, image: NDArray[np.uint8], message: ImageMessage, jpeg_quality: int | None
) -> None:
    """Write one camera into `message`: as a JPEG file where a quality is given, raw otherwise."""
    message.name = name
    message.dtype = UINT8
    message.layout = HWC
    if jpeg_quality is None:
        message.encoding = RAW
        message.data = image.tobytes()
        message.shape.extend(image.shape)
        return
    if image.ndim != 3 or image.shape[2] not in (1, 3):
        raise InvalidRequestError(
            f"image {name!r} of shape {image.shape} cannot be sent as JPEG; send one image of 1 "
            "or 3 channels, or send it raw",
            field=name,
        )
    message.encoding = JPEG
    message.data = encode_jpeg(image, jpeg_quality)
