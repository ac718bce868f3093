"""Images and clips that come as files: told apart by their first bytes, bounded before they are
decoded."""

from __future__ import annotations

import binascii
import io
import re
from base64 import b64decode

import numpy as np
from numpy.typing import NDArray

from phalanx.errors import InvalidRequestError, MissingDependencyError
from phalanx.wire.image_files import MAX_PIXELS, decode_image

_DATA_URL = re.compile(r"data:[\w.+-]+/[\w.+-]+(;[\w.+=-]+)*;base64,")
_JPEG, _PNG = b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"


def file_bytes(text: str, field: str) -> bytes:
    """The file in base64, or in a data URL of it."""
    if text.startswith("data:"):
        found = _DATA_URL.match(text)
        if found is None:
            raise InvalidRequestError(
                f"{field} is a data URL that is not data:TYPE;base64,...", field=field
            )
        text = text[found.end() :]
    elif "://" in text[:16]:
        raise InvalidRequestError(
            f"{field} is an address; this server fetches nothing: send the file's bytes in base64",
            field=field,
        )
    try:
        return b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequestError(f"{field} is not base64: {error}", field=field) from error


def is_image(data: bytes) -> bool:
    return data.startswith((_JPEG, _PNG))


def read_image_file(data: bytes, field: str) -> NDArray[np.uint8]:
    """uint8 (height, width, 3) of a JPEG or PNG. Raises `InvalidRequestError`."""
    if not is_image(data):
        raise InvalidRequestError(f"{field} is neither a JPEG nor a PNG file", field=field)
    return decode_image(data, "jpeg" if data.startswith(_JPEG) else "png", field)


def read_clip_file(data: bytes, field: str, num_frames: int) -> NDArray[np.uint8]:
    """uint8 (frames, height, width, 3): the first `num_frames` of a video file, or all it has.

    Raises `InvalidRequestError`, and `MissingDependencyError` without PyAV.
    """
    try:
        import av
    except ImportError as error:
        raise MissingDependencyError(
            "video files need av; install it with `pip install phalanx[video]`"
        ) from error
    frames: list[NDArray[np.uint8]] = []
    try:
        with av.open(io.BytesIO(data), "r") as container:
            for frame in container.decode(video=0):
                if frame.width * frame.height > MAX_PIXELS:
                    raise InvalidRequestError(
                        f"{field} has frames of {frame.width} x {frame.height} pixels, more than "
                        f"{MAX_PIXELS} in all",
                        field=field,
                    )
                frames.append(np.asarray(frame.to_ndarray(format="rgb24"), np.uint8))
                if len(frames) == num_frames:
                    break
    except (av.FFmpegError, IndexError, ValueError) as error:
        if isinstance(error, InvalidRequestError):
            raise
        raise InvalidRequestError(f"{field} is no readable video: {error}", field=field) from error
    if not frames or any(frame.shape != frames[0].shape for frame in frames):
        raise InvalidRequestError(f"{field} has no frames, or frames of several sizes", field=field)
    return np.stack(frames)
