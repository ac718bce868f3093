"""What somebody wants to see, and the file that it becomes: the values that the video routes, the
command line and plugins that make videos have in common.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Self

import numpy as np
from numpy.typing import NDArray

from phalanx.errors import InvalidRequestError

MAX_SIDE = 8192
MAX_SEED = 2**63
MIN_FPS, MAX_FPS = 0.01, 1000


class VideoFormat(StrEnum):
    """Forms of an answer. `mp4`: a playable file. `png`: the picture of one frame. `npz`: numbers as
    they are, sound too.
    """

    MP4 = "mp4"
    PNG = "png"
    NPZ = "npz"


MEDIA_TYPES = {
    VideoFormat.MP4: "video/mp4",
    VideoFormat.PNG: "image/png",
    VideoFormat.NPZ: "application/octet-stream",
}


@dataclass(frozen=True, eq=False)
class VideoPrompt:
    """One video of a text; None is the model's own choice.

    `width` and `height` in pixels, both or none. `num_frames` or `seconds` says how long it is, 1
    frame being a picture. `guidance_interval`: the timesteps of 1000, both ends included, that are
    guided. `image`, uint8 (height, width, 3), is its first frame; of `clip`, uint8 (frames, height,
    width, 3), the beginning is gone on with. `sound`: sound belongs to it.

    Raises `InvalidRequestError` naming the field for what no model could make.
    """

    prompt: str
    negative_prompt: str | None = None
    width: int | None = None
    height: int | None = None
    num_frames: int | None = None
    seconds: float | None = None
    fps: float | None = None
    seed: int | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    guidance_interval: tuple[int, int] | None = None
    flow_shift: float | None = None
    image: NDArray[np.uint8] | None = None
    clip: NDArray[np.uint8] | None = None
    sound: bool = False

    def __post_init__(self) -> None:
        if not self.prompt.strip():
            raise InvalidRequestError("prompt is empty; say what is to be seen", field="prompt")
        if (self.width is None) != (self.height is None):
            missing = "width" if self.width is None else "height"
            raise InvalidRequestError(f"{missing} is missing; give both or none", field=missing)
        for name, side in (("width", self.width), ("height", self.height)):
            if side is not None and not 1 <= side <= MAX_SIDE:
                raise InvalidRequestError(
                    f"{name}={side} must be from 1 to {MAX_SIDE} pixels", field=name
                )
        self._check_length()
        if self.seed is not None and not 0 <= self.seed < MAX_SEED:
            raise InvalidRequestError(
                f"seed={self.seed} must be from 0 to {MAX_SEED - 1}", field="seed"
            )
        if self.image is not None and self.clip is not None:
            raise InvalidRequestError(
                "there are an image and a video to begin with; give one of both", field="video"
            )

    def _check_length(self) -> None:
        if self.num_frames is not None and self.seconds is not None:
            raise InvalidRequestError(
                "num_frames and seconds both say how long the video is; give one of both",
                field="seconds",
            )
        if self.fps is not None and not MIN_FPS <= self.fps <= MAX_FPS:
            raise InvalidRequestError(
                f"fps={self.fps} must be from {MIN_FPS} to {MAX_FPS}", field="fps"
            )
        for name, value in (("num_frames", self.num_frames), ("seconds", self.seconds)):
            if value is not None and not 0 < value < float("inf"):
                raise InvalidRequestError(f"{name}={value} must be more than 0", field=name)


@dataclass(frozen=True)
class VideoFile:
    """A finished file's bytes, and their media type."""

    data: bytes
    format: VideoFormat

    @property
    def media_type(self) -> str:
        return MEDIA_TYPES[self.format]


@dataclass(frozen=True)
class DenoiseProgress:
    """A delta: `step` of `num_steps` is done, from 1; it was at `timestep` of 1000."""

    step: int
    num_steps: int
    timestep: int

    def merged(self, later: Self) -> Self:
        """Whoever did not read the earlier one wants to know only the later."""
        return later
