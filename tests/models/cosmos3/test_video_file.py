"""A video's file plays: read back with PyAV, it has the video's size, rate and pictures."""

from __future__ import annotations

import av
import pytest
import torch

from phalanx.errors import ConfigurationError, InvalidRequestError
from phalanx.models.cosmos3.video_file import write_video
from tests.forked import run_forked


def moving(frames: int = 9, height: int = 48, width: int = 64) -> torch.Tensor:
    """A picture that brightens, with colors that differ."""
    colors = torch.tensor([0.9, 0.5, 0.1])[:, None, None, None]
    return (colors * torch.linspace(0, 1, frames)[:, None, None]).expand(3, -1, height, width)


@pytest.mark.parametrize("fps", [15.0, 24000 / 1001])
def test_a_file_reads_back_as_what_was_written(tmp_path, fps):
    pixels, path = moving(), tmp_path / "clip.mp4"
    write_video(pixels, path, fps)
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        assert (stream.codec_context.name, stream.pix_fmt) == ("h264", "yuv420p")
        assert (stream.width, stream.height) == (64, 48)
        assert float(stream.average_rate) == pytest.approx(fps)
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert len(frames) == 9
    read = torch.stack([torch.from_numpy(frame) for frame in frames]).permute(3, 0, 1, 2) / 255
    assert (read - pixels).abs().max() < 0.03


def test_a_file_is_replaced_whole_and_nothing_is_left_beside_it(tmp_path):
    path = tmp_path / "clip.mp4"
    path.write_text("another")
    write_video(moving(3), path, 10)
    assert [one.name for one in tmp_path.iterdir()] == ["clip.mp4"]
    with av.open(str(path)) as container:
        assert sum(1 for _ in container.decode(video=0)) == 3


class Broken(torch.Tensor):
    """Pixels that cannot be read to their end."""

    def unbind(self, dim=0):
        yield from self.as_subclass(torch.Tensor).unbind(dim)
        raise RuntimeError("no more frames")


def test_a_video_that_breaks_off_leaves_the_old_file(tmp_path):
    path = tmp_path / "clip.mp4"
    path.write_text("another")
    with pytest.raises(RuntimeError, match="no more frames"):
        # More frames than the encoder holds back, so that some are written before.
        write_video(moving(80, 16, 16).contiguous().as_subclass(Broken), path, 10)
    assert path.read_text() == "another"
    assert [one.name for one in tmp_path.iterdir()] == ["clip.mp4"]


@pytest.mark.parametrize(
    ("pixels", "name", "fps", "error", "said"),
    [
        (moving(), "clip.avi", 10, ConfigurationError, "must end in .mp4"),
        (moving(), "no/clip.mp4", 10, ConfigurationError, "there is no folder"),
        (moving(), "clip.mp4", 0, InvalidRequestError, "fps=0 must be above 0"),
        (moving(width=63), "clip.mp4", 10, InvalidRequestError, "both sides must be even"),
        (moving()[:2], "clip.mp4", 10, InvalidRequestError, "shape (2, 9, 48, 64)"),
    ],
)
def test_what_cannot_be_written_is_refused(tmp_path, pixels, name, fps, error, said):
    with pytest.raises(error) as refused:
        write_video(pixels, tmp_path / name, fps)
    assert said in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_a_missing_library_names_the_extra():
    code = (
        "import sys; sys.modules['av'] = None\n"
        "from phalanx.errors import MissingDependencyError\n"
        "try:\n    import phalanx.models.cosmos3.video_file\n"
        "except MissingDependencyError as error:\n    print(error)"
    )
    said = run_forked(code)
    assert said.stdout.strip() == (
        "writing videos needs PyAV; install it with `pip install phalanx[video]`"
    )
