"""The video half of `phalanx generate`: flags become a prompt, and what comes of it a file.

The file appears whole or not at all.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from phalanx.clock import SystemClock
from phalanx.errors import ConfigurationError
from phalanx.plugin import VideoAdapter
from phalanx.schema.videos import DenoiseProgress, VideoFormat, VideoPrompt

_PAIR = re.compile(r"(\d+)\s*[x,:]\s*(\d+)")


@dataclass(frozen=True)
class VideoFlags:
    """What only videos have; None where a flag is not given."""

    out: Path | None = None
    negative_prompt: str | None = None
    size: str | None = None
    frames: int | None = None
    seconds: float | None = None
    fps: float | None = None
    steps: int | None = None
    guidance: float | None = None
    guidance_interval: str | None = None
    flow_shift: float | None = None
    image: Path | None = None
    video: Path | None = None
    sound: bool | None = None
    tokenizer: Path | None = None

    @property
    def given(self) -> list[str]:
        """The flags that were given."""
        values = (
            ("--out", self.out),
            ("--negative-prompt", self.negative_prompt),
            ("--size", self.size),
            ("--frames", self.frames),
            ("--seconds", self.seconds),
            ("--fps", self.fps),
            ("--steps", self.steps),
            ("--guidance", self.guidance),
            ("--guidance-interval", self.guidance_interval),
            ("--flow-shift", self.flow_shift),
            ("--image", self.image),
            ("--video", self.video),
            ("--sound", self.sound),
            ("--tokenizer", self.tokenizer),
        )
        return [flag for flag, value in values if value is not None]

    @property
    def settings(self) -> dict[str, Any]:
        """Of the plugin's adapter."""
        return {} if self.tokenizer is None else {"tokenizer_dir": str(self.tokenizer)}

    def target(self) -> VideoTarget:
        """Where to write. Raises `ConfigurationError` where that cannot be done."""
        if self.out is None:
            raise ConfigurationError("this model makes videos; give --out clip.mp4")
        target = VideoTarget(self.out)
        if self.sound and target.format is not VideoFormat.NPZ:
            raise ConfigurationError(
                "--sound needs an --out that ends in .npz: sound comes as latents, which no video "
                "file holds"
            )
        return target

    def prompt(self, text: str, seed: int | None, num_clip_frames: int) -> VideoPrompt:
        """Reads the files. Raises `ConfigurationError` and `InvalidRequestError`."""
        width, height = _pair("--size", self.size, "832x480") or (None, None)
        return VideoPrompt(
            prompt=text,
            negative_prompt=self.negative_prompt,
            width=width,
            height=height,
            num_frames=self.frames,
            seconds=self.seconds,
            fps=self.fps,
            seed=seed,
            num_inference_steps=self.steps,
            guidance_scale=self.guidance,
            guidance_interval=_pair("--guidance-interval", self.guidance_interval, "400,1000"),
            flow_shift=self.flow_shift,
            sound=self.sound or False,
            **self._files(num_clip_frames),
        )

    def _files(self, num_clip_frames: int) -> dict[str, Any]:
        if self.image is None and self.video is None:
            return {}
        from phalanx.wire.videos import read_clip_file, read_image_file

        files: dict[str, Any] = {}
        if self.image is not None:
            files["image"] = read_image_file(_bytes_of(self.image), str(self.image))
        if self.video is not None:
            data = _bytes_of(self.video)
            files["clip"] = read_clip_file(data, str(self.video), num_clip_frames)
        return files


class VideoTarget:
    """The file that is to be written."""

    def __init__(self, path: Path) -> None:
        """Raises `ConfigurationError` for a path that nothing can be written to."""
        suffixes = [f".{form}" for form in VideoFormat]
        if path.suffix.lower() not in suffixes:
            raise ConfigurationError(f"--out {path} must end in one of {', '.join(suffixes)}")
        if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
            raise ConfigurationError(
                f"--out {path} cannot be written: name a file in a directory that exists and is yours"
            )
        self.path = path
        self.format = VideoFormat(path.suffix.lower()[1:])

    def write(self, data: bytes) -> None:
        """In one move, so that nobody finds half of it."""
        directory = self.path.parent
        handle, name = tempfile.mkstemp(prefix=f".{self.path.name}.", dir=directory)
        part = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            mask = os.umask(0)
            os.umask(mask)
            part.chmod(0o666 & ~mask)
            part.replace(self.path)
        except BaseException:
            with suppress(FileNotFoundError):
                part.unlink()
            raise


def write_video(
    items: Iterable[Any], adapter: VideoAdapter, prompt: VideoPrompt, target: VideoTarget
) -> None:
    """Show each denoise step on stderr, then write the file and say so."""
    clock = SystemClock()
    started_s = clock.monotonic_s()
    output, num_steps = _denoised(items)
    file = adapter.file(output, prompt, target.format)
    target.write(file.data)
    took_s = clock.monotonic_s() - started_s
    print(
        f"[{num_steps} steps and the file in {took_s:.1f} s; {target.path} has "
        f"{len(file.data)} bytes]",
        file=sys.stderr,
    )


def _denoised(items: Iterable[Any]) -> tuple[Any, int]:
    """The output, and how many steps there were."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    num_steps, output = 0, None
    with Progress(*columns, console=Console(stderr=True)) as screen:
        task = screen.add_task("Denoising", total=None)
        for item in items:
            if isinstance(item, DenoiseProgress):
                num_steps = item.num_steps
                screen.update(task, completed=item.step, total=num_steps)
            else:
                output = item
    return output, num_steps


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from None


def _pair(flag: str, text: str | None, example: str) -> tuple[int, int] | None:
    if text is None:
        return None
    found = _PAIR.fullmatch(text.strip())
    if found is None:
        raise ConfigurationError(f"{flag} {text!r} must be two whole numbers, as {example}")
    return int(found[1]), int(found[2])
