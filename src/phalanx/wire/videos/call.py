"""Parses a body: the fields of OpenAI's and vLLM-Omni's video routes, as JSON."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from phalanx.errors import InvalidRequestError
from phalanx.schema.videos import VideoFormat, VideoPrompt
from phalanx.wire.body import BodyDecoder
from phalanx.wire.videos.media import file_bytes, is_image, read_clip_file, read_image_file

_SIZE = re.compile(r"(\d{1,5})[xX*](\d{1,5})")


class ResponseForm(StrEnum):
    """How a finished video is sent: `b64_json` as OpenAI's images, the others as the file itself."""

    MP4 = "mp4"
    PNG = "png"
    NPZ = "npz"
    B64_JSON = "b64_json"


class VideoBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`size`: WIDTHxHEIGHT. `image`, `video`: files in base64, or data URLs; `input_reference` is
    one of both. `output_format`: of the file in a `b64_json` or a stream.
    """

    prompt: str
    model: str | None = None
    negative_prompt: str | None = None
    size: str | None = None
    width: int | None = None
    height: int | None = None
    num_frames: int | None = None
    seconds: float | str | None = None
    fps: float | None = None
    seed: int | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    guidance_interval: tuple[int, int] | None = None
    flow_shift: float | None = None
    image: str | None = None
    video: str | None = None
    input_reference: str | None = None
    sound: bool = False
    response_format: ResponseForm | None = None
    output_format: VideoFormat | None = None
    stream: bool = False
    n: int = 1
    user: str | None = None
    request_id: str | None = None


_DECODER = BodyDecoder(VideoBody)


@dataclass(frozen=True, eq=False)
class VideoCall:
    """One call. `format` None: a picture of one frame, else a clip; `as_json`: in base64."""

    prompt: VideoPrompt
    model: str | None
    format: VideoFormat | None
    as_json: bool
    stream: bool
    request_id: str | None


def parse_video_call(body: bytes, num_clip_frames: int) -> VideoCall:
    """The call in `body`; raises `MalformedRequestError` or `InvalidRequestError`.

    It decodes images and clips, of which only the first `num_clip_frames`: not in an event loop.
    """
    parsed = _DECODER.decode(body)
    if parsed.n != 1:
        raise InvalidRequestError(
            f"n={parsed.n}; one request makes one video: send several, with seeds of their own",
            field="n",
        )
    form, as_json = _form(parsed)
    if parsed.sound and form is not VideoFormat.NPZ:
        raise InvalidRequestError(
            "sound=true needs response_format=npz: it comes as latents, which no video file holds",
            field="sound",
        )
    image, clip = _files(parsed)
    width, height = _size(parsed)
    prompt = VideoPrompt(
        prompt=parsed.prompt,
        negative_prompt=parsed.negative_prompt,
        width=width,
        height=height,
        num_frames=parsed.num_frames,
        seconds=_seconds(parsed.seconds),
        fps=parsed.fps,
        seed=parsed.seed,
        num_inference_steps=parsed.num_inference_steps,
        guidance_scale=parsed.guidance_scale,
        guidance_interval=parsed.guidance_interval,
        flow_shift=parsed.flow_shift,
        image=None if image is None else read_image_file(*image),
        clip=None if clip is None else read_clip_file(*clip, num_clip_frames),
        sound=parsed.sound,
    )
    return VideoCall(prompt, parsed.model, form, as_json, parsed.stream, parsed.request_id)


def _form(body: VideoBody) -> tuple[VideoFormat | None, bool]:
    asked = body.response_format
    if asked is None or asked is ResponseForm.B64_JSON:
        return body.output_format, asked is not None
    if body.output_format is not None and body.output_format.value != asked.value:
        raise InvalidRequestError(
            f"response_format={asked} and output_format={body.output_format} differ; give one",
            field="output_format",
        )
    return VideoFormat(asked.value), False


_File = tuple[bytes, str]


def _files(body: VideoBody) -> tuple[_File | None, _File | None]:
    """The image and the clip, each with its field's name."""
    image = None if body.image is None else (file_bytes(body.image, "image"), "image")
    clip = None if body.video is None else (file_bytes(body.video, "video"), "video")
    if body.input_reference is None:
        return image, clip
    if image is not None or clip is not None:
        raise InvalidRequestError(
            "input_reference is given beside an image or a video; give one of them",
            field="input_reference",
        )
    reference = (file_bytes(body.input_reference, "input_reference"), "input_reference")
    return (reference, None) if is_image(reference[0]) else (None, reference)


def _size(body: VideoBody) -> tuple[int | None, int | None]:
    if body.size is None:
        return body.width, body.height
    if body.width is not None or body.height is not None:
        raise InvalidRequestError("size is given beside width and height; give one", field="size")
    found = _SIZE.fullmatch(body.size)
    if found is None:
        raise InvalidRequestError(
            f"size={body.size!r} must be WIDTHxHEIGHT in pixels, as 1280x720", field="size"
        )
    return int(found[1]), int(found[2])


def _seconds(given: float | str | None) -> float | None:
    """OpenAI's own clients send it as a string."""
    if not isinstance(given, str):
        return given
    try:
        return float(given)
    except ValueError:
        raise InvalidRequestError(f"seconds={given!r} must be a number", field="seconds") from None
