"""A plugin that makes videos without a model, and its adapter: for tests of what serves them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from phalanx.engine_config import EntryArgs
from phalanx.errors import ConfigurationError, InvalidRequestError
from phalanx.plugin import BatchingEntry, VideoAdapter
from phalanx.schema.events import Delta, Event, Final, Scheduled
from phalanx.schema.limits import Limits
from phalanx.schema.videos import DenoiseProgress, VideoFile, VideoFormat, VideoPrompt

MAX_STEPS = 1_000_000_000
DEFAULT_STEPS = 4


@dataclass(frozen=True)
class FakeVideoArgs(EntryArgs):
    """`before_tick` runs before every tick, where a test can wait or observe. `checkpoint_dir` is
    looked at by nobody.
    """

    checkpoint_dir: str | None = None
    before_tick: Callable[[], None] | None = None


@dataclass(frozen=True)
class FakeVideoRequest:
    """A video of `num_frames`, made in `num_steps`; `text` is what it becomes."""

    text: str
    num_frames: int
    num_steps: int


@dataclass(frozen=True)
class FakeVideoOutput:
    """`num_frames` of them; `text` tells of the prompt."""

    text: str
    num_frames: int


class FakeVideoAdapter:
    """A `VideoAdapter`; a prompt that says "fail" cannot be written to a file."""

    num_clip_frames = 5

    @property
    def model_info(self) -> dict[str, Any]:
        return {"model_path": "fake_video", "model_type": "fake_video"}

    def request(self, prompt: VideoPrompt) -> FakeVideoRequest:
        if prompt.width is not None and prompt.width % 16:
            raise InvalidRequestError(
                f"width={prompt.width} must be a multiple of 16", field="width"
            )
        told = {
            name: value
            for name, value in (
                ("prompt", prompt.prompt),
                ("negative_prompt", prompt.negative_prompt),
                ("size", [prompt.width, prompt.height]),
                ("seed", prompt.seed),
                ("guidance_interval", prompt.guidance_interval),
                ("image", None if prompt.image is None else list(prompt.image.shape)),
                ("clip", None if prompt.clip is None else list(prompt.clip.shape)),
            )
            if value is not None
        }
        text = msgspec.json.encode(told).decode()
        steps = prompt.num_inference_steps
        return FakeVideoRequest(
            text, prompt.num_frames or 9, DEFAULT_STEPS if steps is None else steps
        )

    def check_format(self, prompt: VideoPrompt, format: VideoFormat | None) -> None:
        if format is VideoFormat.PNG and prompt.num_frames != 1:
            raise InvalidRequestError("a picture has 1 frame", field="response_format")

    def file(
        self, output: FakeVideoOutput, prompt: VideoPrompt, format: VideoFormat | None
    ) -> VideoFile:
        if prompt.prompt == "fail":
            raise InvalidRequestError("this video cannot be written", field="response_format")
        if format is None:
            format = VideoFormat.PNG if output.num_frames == 1 else VideoFormat.MP4
        return VideoFile(output.text.encode(), format)


@dataclass
class _Video:
    request: FakeVideoRequest
    done: int = 0


@dataclass
class _State:
    running: dict[str, _Video] = field(default_factory=dict)
    cancelled: list[str] = field(default_factory=list)


class FakeVideo(BatchingEntry):
    """One step of every request a tick."""

    name = "fake_video"
    args_cls = FakeVideoArgs
    request_cls = FakeVideoRequest
    output_cls = FakeVideoOutput

    @staticmethod
    def validate(request: FakeVideoRequest, limits: Limits) -> None:
        if not 1 <= request.num_steps <= MAX_STEPS:
            raise InvalidRequestError(
                f"num_inference_steps={request.num_steps} must be from 1 to {MAX_STEPS}",
                field="num_inference_steps",
            )

    @classmethod
    def videos(cls, args: FakeVideoArgs, settings: Mapping[str, Any]) -> VideoAdapter:
        if settings:
            raise ConfigurationError(f"unknown key {next(iter(settings))}; there are none")
        return FakeVideoAdapter()

    def setup(self, args: FakeVideoArgs) -> None:
        self._args = args
        self._state = _State()

    def start(self, rid: str, request: FakeVideoRequest) -> None:
        self._state.running[rid] = _Video(request)

    def cancel(self, rid: str) -> None:
        if rid in self._state.running:
            self._state.cancelled.append(rid)

    @property
    def busy(self) -> bool:
        return bool(self._state.running)

    def tick(self) -> list[Event]:
        if self._args.before_tick is not None:
            self._args.before_tick()
        events: list[Event] = []
        for rid in self._state.cancelled:
            video = self._state.running.pop(rid)
            events.append(Final(rid, FakeVideoOutput(video.request.text, 0), cancelled=True))
        self._state.cancelled.clear()
        for rid, video in list(self._state.running.items()):
            events.extend(self._advanced(rid, video))
        return events

    def _advanced(self, rid: str, video: _Video) -> list[Event]:
        request = video.request
        events: list[Event] = [Scheduled(rid)] if video.done == 0 else []
        video.done += 1
        timestep = 999 - video.done
        events.append(Delta(rid, DenoiseProgress(video.done, request.num_steps, timestep)))
        if video.done == request.num_steps:
            del self._state.running[rid]
            events.append(Final(rid, FakeVideoOutput(request.text, request.num_frames)))
        return events
