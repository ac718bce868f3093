"""`phalanx generate` of a model that makes videos: flags, files, and what is left of a failure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from phalanx import Engine
from phalanx.cli.generate_video import VideoTarget
from phalanx.errors import ConfigurationError
from phalanx.schema.videos import VideoFile, VideoFormat, VideoPrompt
from phalanx.testing.videos import (
    FakeVideo,
    FakeVideoAdapter,
    FakeVideoArgs,
    FakeVideoOutput,
)


class Interrupted(FakeVideoAdapter):
    """Somebody presses Ctrl-C while the file is made."""

    def file(
        self, output: FakeVideoOutput, prompt: VideoPrompt, format: VideoFormat | None
    ) -> VideoFile:
        raise KeyboardInterrupt


class InterruptedVideo(FakeVideo):
    name = "interrupted_video"

    @classmethod
    def videos(cls, args: FakeVideoArgs, settings: Mapping[str, Any]) -> FakeVideoAdapter:
        return Interrupted()


@pytest.fixture(scope="module", autouse=True)
def plugins() -> None:
    for plugin in (FakeVideo, InterruptedVideo):
        if plugin.name not in Engine.registered():
            Engine.register(plugin)


@pytest.fixture
def make(run, tmp_path):
    """Runs the command for the fake model; gives exit code, stdout and stderr."""

    def command(*flags: str, plugin: str = "fake_video") -> tuple[int, str, str]:
        return run("generate", "--plugin", plugin, "--model", str(tmp_path), *flags)

    return command


def test_the_file_is_what_the_model_made(make, tmp_path):
    out = tmp_path / "clip.mp4"
    code, text, errors = make(
        "a hand", "--out", str(out), "--size", "64x48", "--frames", "9", "--steps", "3",
        "--seed", "7", "--negative-prompt", "blurred", "--guidance-interval", "400,1000",
    )  # fmt: skip
    assert (code, text) == (0, ""), errors
    assert json.loads(out.read_text()) == {
        "prompt": "a hand",
        "negative_prompt": "blurred",
        "size": [64, 48],
        "seed": 7,
        "guidance_interval": [400, 1000],
    }
    assert "Denoising" in errors and "3/3" in errors
    assert "[3 steps and the file in " in errors and str(out) in errors
    assert [path.name for path in tmp_path.iterdir()] == ["clip.mp4"]


def test_the_prompt_may_be_a_flag(make, tmp_path):
    out = tmp_path / "one.png"
    code, _, errors = make("--prompt", "a hand", "--out", str(out), "--frames", "1")
    assert code == 0, errors
    assert json.loads(out.read_text())["prompt"] == "a hand"


def test_an_image_to_begin_with(make, tmp_path):
    image = tmp_path / "first.png"
    Image.fromarray(np.zeros((10, 20, 3), np.uint8)).save(image)
    code, _, errors = make("a hand", "--out", str(tmp_path / "a.mp4"), "--image", str(image))
    assert code == 0, errors
    assert json.loads((tmp_path / "a.mp4").read_text())["image"] == [10, 20, 3]


def test_an_old_file_is_replaced_only_by_a_finished_one(make, tmp_path):
    out = tmp_path / "clip.mp4"
    out.write_text("old")
    code, *_ = make("fail", "--out", str(out))
    assert (code, out.read_text()) == (2, "old")
    code, *_ = make("a hand", "--out", str(out))
    assert (code, json.loads(out.read_text())["prompt"]) == (0, "a hand")
    assert [path.name for path in tmp_path.iterdir()] == ["clip.mp4"]


def test_an_interrupt_leaves_nothing(make, tmp_path):
    code, *_ = make("a hand", "--out", str(tmp_path / "clip.mp4"), plugin="interrupted_video")
    assert code == 130
    assert list(tmp_path.iterdir()) == []


def test_half_of_a_file_is_never_found(tmp_path):
    target = VideoTarget(tmp_path / "clip.mp4")
    with pytest.raises(TypeError):
        target.write("no bytes")  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("message", "flags"),
    [
        ("give --out clip.mp4", ("a hand",)),
        ("must end in one of .mp4, .png, .npz", ("a hand", "--out", "clip.gif")),
        ("cannot be written", ("a hand", "--out", "nowhere/clip.mp4")),
        ("--size '720p' must be two whole numbers", ("a hand", "--out", "c.mp4", "--size", "720p")),
        ("as 400,1000", ("a hand", "--out", "c.mp4", "--guidance-interval", "4")),
        ("cannot read none.png", ("a hand", "--out", "c.mp4", "--image", "none.png")),
        ("--sound needs an --out", ("a hand", "--out", "c.mp4", "--sound")),
        ("give the prompt once", ("--out", "c.mp4")),
        ("give the prompt once", ("a hand", "--prompt", "b", "--out", "c.mp4")),
        ("--temperature is not for this model", ("a", "--out", "c.mp4", "--temperature", "1")),
        ("num_inference_steps=0 must be", ("a hand", "--out", "c.mp4", "--steps", "0")),
        ("num_frames=0 must be more than 0", ("a hand", "--out", "c.mp4", "--frames", "0")),
        ("cfg_size=2", ("a", "--out", "c.mp4", "--cfg", "2")),
    ],
)
def test_mistakes_are_one_line_and_leave_no_file(make, tmp_path, monkeypatch, message, flags):
    monkeypatch.chdir(tmp_path)
    code, text, errors = make(*flags)
    assert (code, text) == (2, "")
    assert message in errors.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def test_flags_of_videos_are_not_for_text(run):
    code, _, errors = run("generate", "hello", "--out", "clip.mp4")
    assert code == 2
    assert "--out is not for this model, which makes text" in errors


def test_a_directory_is_no_file(tmp_path):
    (tmp_path / "clip.mp4").mkdir()
    with pytest.raises(ConfigurationError, match="cannot be written"):
        VideoTarget(Path(tmp_path / "clip.mp4"))
