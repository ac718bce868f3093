"""Writes a video as a file that plays everywhere: H.264 in MP4."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path

from torch import Tensor

from phalanx.errors import ConfigurationError, InvalidRequestError, MissingDependencyError

try:
    import av
    from av.video.stream import VideoStream
except ImportError as error:
    raise MissingDependencyError(
        "writing videos needs PyAV; install it with `pip install phalanx[video]`"
    ) from error

_QUALITY = "18"
"""The rate factor of x264, at which nobody sees a difference."""


def write_video(pixels: Tensor, path: Path, fps: float) -> None:
    """Write `pixels` [3, frames, height, width] in [0, 1] to `path`, which ends in .mp4.

    The file appears whole or not at all. Raises `ConfigurationError` for a path that cannot be
    written, `InvalidRequestError` for pixels that are no video.
    """
    _check(pixels, path, fps)
    with _whole_file(path) as unfinished:
        _encode(pixels, unfinished, fps)


def _check(pixels: Tensor, path: Path, fps: float) -> None:
    if path.suffix.lower() != ".mp4":
        raise ConfigurationError(f"video file {str(path)!r} must end in .mp4")
    if not path.parent.is_dir():
        raise ConfigurationError(
            f"video file {str(path)!r}: there is no folder {str(path.parent)!r}; make it first"
        )
    if not fps > 0:
        raise InvalidRequestError(f"fps={fps} must be above 0", field="fps")
    if pixels.dim() != 4 or pixels.shape[0] != 3 or 0 in pixels.shape:
        raise InvalidRequestError(
            f"a video of shape {tuple(pixels.shape)} cannot be written; give pixels [3, frames, "
            "height, width]"
        )
    if any(side % 2 for side in pixels.shape[2:]):
        raise InvalidRequestError(
            f"a video of {pixels.shape[2]} x {pixels.shape[3]} pixels cannot be written: both sides "
            "must be even, since colors are stored for 2 x 2 pixels"
        )


@contextmanager
def _whole_file(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to, which becomes it at the end."""
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as scratch:
            unfinished = Path(scratch) / path.name
            yield unfinished
            unfinished.replace(path)
    except OSError as error:
        raise ConfigurationError(f"video file {str(path)!r} cannot be written: {error}") from error


def _encode(pixels: Tensor, path: Path, fps: float) -> None:
    _, _, height, width = pixels.shape
    with av.open(str(path), "w", options={"movflags": "faststart"}) as container:
        stream = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1001))
        assert isinstance(stream, VideoStream)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.options = {"crf": _QUALITY}
        for frame in pixels.unbind(1):
            levels = frame.float().mul(255).round_().clamp_(0, 255).byte()
            colors = levels.permute(1, 2, 0).contiguous().cpu().numpy()
            container.mux(stream.encode(av.VideoFrame.from_ndarray(colors, format="rgb24")))
        container.mux(stream.encode(None))
