"""Answers in JSON: a whole one, and the events of a stream."""

from __future__ import annotations

from base64 import b64encode

import msgspec

from phalanx.schema.videos import DenoiseProgress, VideoFile
from phalanx.wire.sse import DONE, data_line


class _Item(msgspec.Struct, frozen=True, kw_only=True):
    b64_json: str
    media_type: str


class _Answer(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    created: int
    model: str
    data: list[_Item]


class _Progress(msgspec.Struct, frozen=True, kw_only=True):
    step: int
    num_steps: int
    timestep: int
    progress: float
    type: str = "video_generation.progress"


class _Completed(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    created: int
    model: str
    b64_json: str
    media_type: str
    type: str = "video_generation.completed"


def answer_body(file: VideoFile, *, id: str, model: str, created: int) -> bytes:
    """The whole answer, worded as OpenAI's images are."""
    item = _Item(b64_json=_base64(file), media_type=file.media_type)
    return msgspec.json.encode(_Answer(id=id, created=created, model=model, data=[item]))


def progress_event(progress: DenoiseProgress) -> bytes:
    """`progress` is in percent, as OpenAI's video jobs tell it."""
    return data_line(
        msgspec.json.encode(
            _Progress(
                step=progress.step,
                num_steps=progress.num_steps,
                timestep=progress.timestep,
                progress=round(100 * progress.step / progress.num_steps, 1),
            )
        )
    )


def completed_event(file: VideoFile, *, id: str, model: str, created: int) -> bytes:
    """The last event of a stream, and its end."""
    body = _Completed(
        id=id,
        created=created,
        model=model,
        b64_json=_base64(file),
        media_type=file.media_type,
    )
    return data_line(msgspec.json.encode(body)) + DONE


def _base64(file: VideoFile) -> str:
    return b64encode(file.data).decode()
