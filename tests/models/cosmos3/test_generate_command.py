"""`phalanx generate` of a real, if small, Cosmos3: a process that leaves a file which plays."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from phalanx.testing.tiny_cosmos3 import write_tiny_cosmos3
from tests import forked
from tests.forked import run_forked
from tests.models.cosmos3.served import PHALANX

SMALL = ("--size", "64x48", "--frames", "9", "--steps", "4", "--num-threads", "1")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_tiny_cosmos3(tmp_path_factory.mktemp("models") / "tiny")


def command(model: Path, out: Path, *flags: str) -> list[str]:
    return [
        str(PHALANX), "generate", "--model", str(model), "--prompt", "a hand picks up a cube",
        "--device", "cpu", "--out", str(out), *SMALL, *flags,
    ]  # fmt: skip


def made(model: Path, out: Path, *flags: str) -> str:
    done = run_forked(forked.PHALANX, command(model, out, *flags)[1:])
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    return done.stderr


def frames_of(path: Path) -> np.ndarray:
    av = pytest.importorskip("av", reason="clips need PyAV (phalanx[video])")
    with av.open(str(path)) as container:
        return np.stack([one.to_ndarray(format="rgb24") for one in container.decode(video=0)])


def test_a_clip_is_written_that_plays(model, tmp_path):
    told = made(model, tmp_path / "clip.mp4", "--fps", "8")
    assert "4/4" in told
    assert frames_of(tmp_path / "clip.mp4").shape == (9, 48, 64, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["clip.mp4"]


@pytest.mark.long
def test_a_picture_begins_a_clip_and_a_clip_goes_on(model, tmp_path):
    picture = tmp_path / "first.png"
    made(model, picture, "--frames", "1", "--guidance", "1")
    with Image.open(picture) as image:
        assert image.size == (64, 48)
    made(model, tmp_path / "a.mp4", "--image", str(picture), "--negative-prompt", "blurred")
    made(model, tmp_path / "b.mp4", "--video", str(tmp_path / "a.mp4"), "--seed", "7")
    assert frames_of(tmp_path / "b.mp4").shape == (9, 48, 64, 3)


@pytest.mark.long
def test_ranks_make_the_same_video(model, tmp_path):
    made(model, tmp_path / "one.npz")
    made(model, tmp_path / "four.npz", "--tp", "2", "--cfg", "2")
    one, four = (np.load(tmp_path / f"{name}.npz")["video"] for name in ("one", "four"))
    assert np.abs(one - four).max() < 1e-3


@contextmanager
def watched(arguments: list[str]) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The process, and what it shows on a terminal."""
    screen, inside = pty.openpty()
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=inside)
    os.close(inside)
    try:
        yield process, screen
    finally:
        process.kill()
        process.wait()
        os.close(screen)


def test_ctrl_c_in_the_middle_leaves_no_file(model, tmp_path):
    endless = command(model, tmp_path / "clip.mp4", "--steps", "1000", "--size", "320x192")
    with watched(endless) as (process, screen):
        shown = b""
        while b"/1000" not in shown:  # a step is done
            shown += os.read(screen, 4096)
        process.send_signal(signal.SIGINT)
        with pytest.raises(OSError):  # noqa: PT011 - the terminal's other side is closed
            while os.read(screen, 4096):
                pass
        assert process.wait() == 130
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_a_form_that_does_not_fit_is_refused_before_anything_is_computed(model, tmp_path):
    done = subprocess.run(
        command(model, tmp_path / "clip.png"), capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "a PNG has one frame, and this video 9" in done.stderr
    assert "Denoising" not in done.stderr and list(tmp_path.iterdir()) == []
