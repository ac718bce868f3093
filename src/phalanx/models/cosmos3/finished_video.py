"""A finished video as the bytes of a file: a clip that plays, a picture, or its numbers."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path
from types import ModuleType

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from phalanx.errors import InvalidRequestError, MissingDependencyError
from phalanx.models.cosmos3.request import Cosmos3Video
from phalanx.schema.videos import VideoFile, VideoFormat


def video_bytes(output: Cosmos3Video, fps: float, format: VideoFormat | None) -> VideoFile:
    """`format` None: a picture of one frame, else a clip.

    Raises `InvalidRequestError` where the video has more frames than the form takes, and
    `MissingDependencyError` where the library that writes it is not installed.
    """
    pixels = output.video[0].detach().float().cpu()
    format = _chosen(pixels.shape[1], format)
    match format:
        case VideoFormat.MP4:
            data = _mp4(pixels, fps)
        case VideoFormat.PNG:
            data = _png(pixels)
        case VideoFormat.NPZ:
            data = _npz(pixels, output.sound, fps)
    return VideoFile(data, format)


def _chosen(num_frames: int, format: VideoFormat | None) -> VideoFormat:
    if format is not None:
        return format
    return VideoFormat.PNG if num_frames == 1 else VideoFormat.MP4


def check_format(num_frames: int, format: VideoFormat | None) -> None:
    """Refuse what `video_bytes` could not make of so many frames. Raises as it does."""
    match _chosen(num_frames, format):
        case VideoFormat.MP4:
            from phalanx.models.cosmos3 import video_file  # noqa: F401
        case VideoFormat.PNG:
            _pillow()
            _check_picture(num_frames)
        case VideoFormat.NPZ:
            pass


def _mp4(pixels: Tensor, fps: float) -> bytes:
    from phalanx.models.cosmos3.video_file import write_video

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "clip.mp4"
        write_video(pixels, path, fps)
        return path.read_bytes()


def _check_picture(num_frames: int) -> None:
    if num_frames != 1:
        raise InvalidRequestError(
            f"a PNG has one frame, and this video {num_frames}; ask for mp4, or for 1 frame",
            field="response_format",
        )


def _pillow() -> ModuleType:
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingDependencyError(
            "pictures need pillow; install it with `pip install phalanx[serve]`"
        ) from error
    return Image


def _png(pixels: Tensor) -> bytes:
    _check_picture(pixels.shape[1])
    levels = pixels[:, 0].mul(255).round().clamp(0, 255).byte().permute(1, 2, 0)
    target = io.BytesIO()
    _pillow().fromarray(levels.contiguous().numpy()).save(target, "PNG")
    return target.getvalue()


def _npz(pixels: Tensor, sound: Tensor | None, fps: float) -> bytes:
    """`video` float32 (3, frames, height, width) in [0, 1], `fps`, and `sound` latents (dim, n)."""
    arrays: dict[str, NDArray[np.float64] | NDArray[np.float32]] = {
        "video": pixels.numpy(),
        "fps": np.asarray(fps, np.float64),
    }
    if sound is not None:
        arrays["sound"] = sound[0].detach().float().cpu().numpy()
    target = io.BytesIO()
    np.savez(target, **arrays)  # type: ignore[arg-type]
    return target.getvalue()
