"""The texts that Cosmos3 was trained to read: what is wanted, and how long, fast and large it is.

A text says the same of itself as the request does, so both are made of one `Format`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from phalanx.errors import CheckpointError, InvalidRequestError
from phalanx.processing.text.tokenizer import TextTokenizer

FOLDER = "text_tokenizer"
VISION_START = "<|vision_start|>"

# Both as they were trained, with the slip that they contain.
SYSTEM_IMAGE = "You are a helpful assistant who will generate images from a give prompt."
SYSTEM_VIDEO = "You are a helpful assistant who will generate videos from a give prompt."

VIEWPOINTS = {
    "ego_view": ("This video is captured from a first-person perspective looking at the scene."),
    "third_person_view": (
        "This video is captured from a third-person perspective looking towards the agent from "
        "the front."
    ),
    "wrist_view": "This video is captured from a wrist-mounted camera.",
    "concat_view": "This video contains concatenated views from multiple camera perspectives.",
}
"""Where the camera of a robot is, by the name of the viewpoint."""

_ASPECTS = {"16,9": 16 / 9, "4,3": 4 / 3, "1,1": 1.0, "3,4": 3 / 4, "9,16": 9 / 16}


@dataclass(frozen=True)
class Format:
    """What a video (an image, if `frames` is 1) is to be; of a robot's, the size of its canvas."""

    frames: int
    fps: float
    height: int
    width: int


def media_prompt(
    text: str,
    format: Format,
    *,
    negative: bool = False,
    duration: bool = True,
    resolution: bool = True,
) -> str:
    """The prompt of an image or a video; a `negative` one says what it is not.

    Without `duration` and `resolution` those sentences are left out.
    """
    verb = "is not" if negative else "is"
    is_image = format.frames == 1
    if duration and not is_image:
        seconds = format.frames / format.fps
        text = _followed(
            text, f"The video {verb} {seconds:.1f} seconds long and {verb} of {format.fps:.0f} FPS."
        )
    if resolution:
        kind = "image" if is_image else "video"
        text = _followed(text, f"This {kind} {verb} of {format.height}x{format.width} resolution.")
    return text


def action_prompt(text: str, format: Format, viewpoint: str | None = "ego_view") -> str:
    """The prompt of a robot's task: JSON with the instruction, and what the video will be.

    The negative prompt beside it stays as it is. `viewpoint` is one of `VIEWPOINTS`, or None.
    """
    seconds = format.frames / format.fps
    minutes, rest = divmod(round(seconds), 60)
    framing = {} if viewpoint is None else {"cinematography": {"framing": _sentence(viewpoint)}}
    shape = format.width / format.height
    caption = {
        **framing,
        "actions": [{"time": f"0:00-{minutes}:{rest:02d}", "description": _ended(text)}],
        "duration": f"{int(seconds)}s",
        "fps": float(format.fps),
        "resolution": {"H": format.height, "W": format.width},
        "aspect_ratio": min(_ASPECTS, key=lambda name: abs(_ASPECTS[name] - shape)),
    }
    return json.dumps(caption)


def plain_action_prompt(text: str, format: Format, viewpoint: str | None = "ego_view") -> str:
    """The same in sentences, as policies read it that were trained further on DROID; the negative
    prompt beside it is empty.
    """
    if viewpoint is not None:
        text = _followed(text, _sentence(viewpoint))
    return media_prompt(text, format)


class PromptTokenizer:
    """The tokenizer of a checkpoint, with its chat template."""

    def __init__(self, directory: Path, folder: Path | None = None) -> None:
        """Read `text_tokenizer/` of a checkpoint's `directory`, or `folder` in its place. Raises
        `CheckpointError`.
        """
        folder = directory / FOLDER if folder is None else folder
        if not folder.is_dir():
            raise CheckpointError(
                f"{folder} does not exist; texts are read with the tokenizer that a checkpoint of "
                "diffusers has there, or send token ids"
            )
        self._tokenizer = TextTokenizer(folder)
        end, start = self._tokenizer.eos_token_id, self._tokenizer.token_id(VISION_START)
        if end is None or start is None or self._tokenizer.chat_template is None:
            raise CheckpointError(
                f"{folder} has no eos_token, no token {VISION_START} or no chat template; it must be "
                "a tokenizer of Qwen, which has all three"
            )
        self._behind = (end, start)

    def encode(self, prompt: str, system: str | None = None) -> list[int]:
        """The ids of a whole text: `prompt` as the user's turn behind that of the `system`, the
        answer begun, and the two markers that a video begins with.
        """
        turns = [{"role": "user", "content": prompt}]
        if system is not None:
            turns.insert(0, {"role": "system", "content": system})
        text = self._tokenizer.render_chat(turns, variables={"add_vision_id": False})
        return [*self._tokenizer.encode_chat(text), *self._behind]


def _followed(text: str, sentence: str) -> str:
    """`text`, with one full stop and `sentence` behind it."""
    before = text.rstrip(".")
    return f"{before}. {sentence}" if before else sentence


def _ended(text: str) -> str:
    """`text` with a mark at its end."""
    text = text.strip()
    return text if not text or text[-1] in ".!?" else f"{text}."


def _sentence(viewpoint: str) -> str:
    found = VIEWPOINTS.get(viewpoint)
    if found is None:
        raise InvalidRequestError(
            f"viewpoint={viewpoint!r}; allowed: {', '.join(VIEWPOINTS)}, or none",
            field="viewpoint",
        )
    return found
