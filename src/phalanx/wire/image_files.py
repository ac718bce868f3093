"""JPEG and PNG images to arrays and back, with the size known before any pixel is decoded."""

from __future__ import annotations

import io
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, JpegImagePlugin, PngImagePlugin

from phalanx.errors import InvalidRequestError

Encoding = Literal["jpeg", "png"]

MAX_PIXELS = 4096 * 4096
"""Of one image, and of all images of one request that come as files."""
MAX_JPEG_SCANS = 20
"""Each scan of a progressive JPEG goes over all its pixels again; encoders write about ten."""

_START_OF_SCAN = b"\xff\xda"
_MODES = ("1", "L", "LA", "P", "RGB", "RGBA")


def decode_image(
    data: bytes, encoding: Encoding, name: str, max_pixels: int = MAX_PIXELS
) -> NDArray[np.uint8]:
    """The image as uint8 of shape (height, width, 3); grey ones get three equal channels.

    Raises `InvalidRequestError`, with `name` as its field, where it is not such a file, is damaged,
    or has more than `max_pixels`.
    """
    if encoding == "jpeg" and data.count(_START_OF_SCAN) > MAX_JPEG_SCANS:
        raise InvalidRequestError(
            f"image {name!r} is a JPEG of more than {MAX_JPEG_SCANS} scans", field=name
        )
    try:
        with _opened(data, encoding) as image:
            _check_header(image, name, max_pixels)
            return np.asarray(image.convert("RGB"))
    except (OSError, SyntaxError, ValueError, EOFError, IndexError, TypeError) as error:
        if isinstance(error, InvalidRequestError):
            raise
        raise InvalidRequestError(
            f"image {name!r} is no readable {encoding.upper()} file: {error}", field=name
        ) from error


def encode_jpeg(image: NDArray[np.uint8], quality: int) -> bytes:
    """The file of an image of shape (height, width, 3) or (height, width, 1)."""
    target = io.BytesIO()
    grey = image.shape[2] == 1
    Image.fromarray(image[:, :, 0] if grey else image).save(target, "JPEG", quality=quality)
    return target.getvalue()


def _opened(data: bytes, encoding: Encoding) -> Image.Image:
    """The header. By the file class itself: `Image.open` would warn of sizes before we refuse them."""
    if encoding == "jpeg":
        return JpegImagePlugin.JpegImageFile(io.BytesIO(data))
    return PngImagePlugin.PngImageFile(io.BytesIO(data))


def _check_header(image: Image.Image, name: str, max_pixels: int) -> None:
    width, height = image.size
    if width * height > max_pixels:
        raise InvalidRequestError(
            f"image {name!r} has {width}x{height} pixels, and {max_pixels} are left of those that "
            f"one request may have; send smaller images",
            field=name,
        )
    if image.mode not in _MODES:
        raise InvalidRequestError(
            f"image {name!r} has colour mode {image.mode!r}; send one of {', '.join(_MODES)}",
            field=name,
        )
