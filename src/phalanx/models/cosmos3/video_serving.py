"""Between somebody's wish and the plugin `cosmos3`: what is not said is as the model was shown."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor

from phalanx.errors import InvalidRequestError, RequestFailedError
from phalanx.models.cosmos3.adapter_args import adapter_args, checked_as_requests
from phalanx.models.cosmos3.args import Cosmos3Args
from phalanx.models.cosmos3.checkpoint import read_config
from phalanx.models.cosmos3.conditioning import clip_frames, frames_of, image_frame
from phalanx.models.cosmos3.finished_video import check_format, video_bytes
from phalanx.models.cosmos3.geometry import (
    SPATIAL_STRIDE,
    TEMPORAL_STRIDE,
    latent_grid,
    sound_length,
)
from phalanx.models.cosmos3.prompt import Format, media_prompt
from phalanx.models.cosmos3.request import Cosmos3T2VRequest, Cosmos3Video
from phalanx.models.cosmos3.texts import Texts
from phalanx.models.cosmos3.validation import check_sampling
from phalanx.schema.videos import VideoFile, VideoFormat, VideoPrompt

T = TypeVar("T")

IMAGE_FRAMES = (0,)
CLIP_FRAMES = (0, 1)
"""Latent frames that an image, or the beginning of a clip, is kept as."""
COLORS = 3


class VideoSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`adapter.args` of a server: what a request gets that does not say otherwise.

    `flow_shift` is for videos of a text or a clip; pictures, and videos of an image, have the
    checkpoint's schedule. `tokenizer_dir`: the folder of `tokenizer.json`, where the checkpoint has
    none.
    """

    tokenizer_dir: str | None = None
    width: int = 1280
    height: int = 720
    num_frames: int = 189
    fps: float = 24.0
    num_inference_steps: int = 35
    guidance_scale: float = 6.0
    flow_shift: float = 10.0
    negative_prompt: str = ""
    seed: int = 42

    def __post_init__(self) -> None:
        with checked_as_requests():
            VideoPrompt(
                "any",
                width=self.width,
                height=self.height,
                num_frames=self.num_frames,
                fps=self.fps,
                seed=self.seed,
            )
            _check_sides(self.width, self.height)
            _check_length(self.num_frames)
            check_sampling(self.num_inference_steps, self.guidance_scale, self.flow_shift, None)


def video_settings(given: Mapping[str, object]) -> VideoSettings:
    """Raises `ConfigurationError` as `adapter_args`."""
    return adapter_args(given, VideoSettings)


@dataclass(frozen=True, eq=False)
class _Condition:
    """Pixels [3, F, height, width] that a video begins with, and the latent frames they are kept as."""

    pixels: Tensor
    kept: tuple[int, ...]


class Cosmos3Videos:
    """A `VideoAdapter`; the weights are not read."""

    num_clip_frames = frames_of(CLIP_FRAMES)

    def __init__(self, args: Cosmos3Args, settings: VideoSettings) -> None:
        """Raises `CheckpointError` naming what the checkpoint lacks."""
        self._directory = Path(args.checkpoint_dir)
        self._config = read_config(self._directory)
        self._settings = settings
        self._texts = Texts(self._directory, settings.tokenizer_dir)
        self._max_tokens = args.max_tokens

    @property
    def model_info(self) -> dict[str, Any]:
        config = self._config
        return {
            "model_path": str(self._directory),
            "model_type": "cosmos3",
            "hidden_size": config.hidden_size,
            "num_hidden_layers": config.num_hidden_layers,
            "has_sound": config.sound_gen,
            "max_tokens": self._max_tokens,
        }

    def request(self, prompt: VideoPrompt) -> Cosmos3T2VRequest:
        settings = self._settings
        form = self._format(prompt)
        condition = _condition(prompt, form)
        guidance = _given(prompt.guidance_scale, settings.guidance_scale)
        text_ids, text_mask = self._texts.tensors(media_prompt(prompt.prompt, form), form)
        negative = _given(prompt.negative_prompt, settings.negative_prompt)
        neg_ids, neg_mask = self._texts.tensors(media_prompt(negative, form, negative=True), form)
        follows_checkpoint = form.frames == 1 or prompt.image is not None
        shift = None if follows_checkpoint else settings.flow_shift
        return Cosmos3T2VRequest(
            text_ids=text_ids,
            text_mask=text_mask,
            neg_text_ids=neg_ids,
            neg_text_mask=neg_mask,
            video_shape=latent_grid(form.frames, form.height, form.width),
            fps=form.fps,
            num_inference_steps=_given(prompt.num_inference_steps, settings.num_inference_steps),
            guidance_scale=guidance,
            seed=_given(prompt.seed, settings.seed),
            cond_frame_indexes=() if condition is None else condition.kept,
            sound_frames=sound_length(form.frames, form.fps) if prompt.sound else None,
            sound_dim=self._config.sound_dim,
            sound_latent_fps=self._config.sound_latent_fps,
            guidance_interval=prompt.guidance_interval,
            flow_shift=shift if prompt.flow_shift is None else prompt.flow_shift,
            cond_video_pixels=None if condition is None else condition.pixels[None],
        )

    def check_format(self, prompt: VideoPrompt, format: VideoFormat | None) -> None:
        check_format(self._format(prompt).frames, format)

    def file(
        self, output: Cosmos3Video, prompt: VideoPrompt, format: VideoFormat | None
    ) -> VideoFile:
        if output.video.shape[1] != COLORS:
            # Its latents: all that there is of a request that was ended.
            raise RequestFailedError("the request was ended before the video was complete")
        return video_bytes(output, _given(prompt.fps, self._settings.fps), format)

    def _format(self, prompt: VideoPrompt) -> Format:
        settings = self._settings
        width, height = (
            _given(prompt.width, settings.width),
            _given(prompt.height, settings.height),
        )
        _check_sides(width, height)
        fps = _given(prompt.fps, settings.fps)
        return Format(self._frames(prompt, fps), fps, height, width)

    def _frames(self, prompt: VideoPrompt, fps: float) -> int:
        """A number that the model can make: one, and fours behind it."""
        if prompt.seconds is not None:
            length = prompt.seconds * fps
            if not math.isfinite(length):
                raise InvalidRequestError(
                    f"seconds={prompt.seconds} with fps={fps}: make it shorter", field="seconds"
                )
            return 1 + TEMPORAL_STRIDE * max(0, round((length - 1) / TEMPORAL_STRIDE))
        frames = _given(prompt.num_frames, self._settings.num_frames)
        _check_length(frames)
        return frames


def _check_sides(width: int, height: int) -> None:
    for field, side in (("width", width), ("height", height)):
        over = side % SPATIAL_STRIDE
        if over:
            near = [side - over, side - over + SPATIAL_STRIDE]
            allowed = " or ".join(str(one) for one in near if one)
            raise InvalidRequestError(
                f"{field}={side} must be a multiple of {SPATIAL_STRIDE}: {allowed}", field=field
            )


def _check_length(frames: int) -> None:
    over = (frames - 1) % TEMPORAL_STRIDE
    if over:
        raise InvalidRequestError(
            f"num_frames={frames} must be 1 more than a multiple of {TEMPORAL_STRIDE}: "
            f"{frames - over} or {frames - over + TEMPORAL_STRIDE}",
            field="num_frames",
        )


def _condition(prompt: VideoPrompt, form: Format) -> _Condition | None:
    if prompt.image is not None:
        image = torch.from_numpy(prompt.image.copy()).permute(2, 0, 1)
        return _Condition(image_frame(image, form.height, form.width), IMAGE_FRAMES)
    if prompt.clip is None:
        return None
    clip = torch.from_numpy(prompt.clip.copy()).permute(0, 3, 1, 2)
    last = (form.frames - 1) // TEMPORAL_STRIDE
    kept = tuple(frame for frame in CLIP_FRAMES if frame <= last)
    return _Condition(clip_frames(clip, form.height, form.width, kept), kept)


def _given(value: T | None, default: T) -> T:
    return default if value is None else value
