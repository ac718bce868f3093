"""From a wish in words to the plugin's request, and from its output to a file."""

from __future__ import annotations

import io
import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from phalanx.errors import (
    CheckpointError,
    ConfigurationError,
    InvalidRequestError,
    RequestFailedError,
)
from phalanx.models.cosmos3.args import Cosmos3Args
from phalanx.models.cosmos3.entry import Cosmos3
from phalanx.models.cosmos3.request import Cosmos3T2VRequest, Cosmos3Video
from phalanx.models.cosmos3.validation import check_video_request, limits_of
from phalanx.models.cosmos3.video_serving import Cosmos3Videos, video_settings
from phalanx.processing.text import TextTokenizer
from phalanx.schema.videos import VideoFormat, VideoPrompt
from phalanx.testing.tiny_cosmos3 import Cosmos3Sizes, write_tiny_cosmos3

SMALL = {"width": 64, "height": 48, "num_frames": 9, "fps": 8.0, "num_inference_steps": 4}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_tiny_cosmos3(tmp_path_factory.mktemp("cosmos3"))


@pytest.fixture(scope="module")
def videos(directory) -> Cosmos3Videos:
    return Cosmos3Videos(Cosmos3Args(directory), video_settings(SMALL))


def text_of(directory, ids) -> str:
    return TextTokenizer(directory / "text_tokenizer").decode(
        ids[0].tolist(), skip_special_tokens=False
    )


def test_what_is_not_said_is_the_settings(videos, directory):
    request = videos.request(VideoPrompt("A hand."))
    assert request.video_shape == (3, 3, 4)
    assert (request.fps, request.num_inference_steps, request.guidance_scale) == (8.0, 4, 6.0)
    assert (request.seed, request.flow_shift, request.sound_frames) == (42, 10.0, None)
    text = text_of(directory, request.text_ids)
    assert "A hand. The video is 1.1 seconds long and is of 8 FPS." in text
    assert "This video is of 48x64 resolution." in text
    assert "generate videos from a give prompt" in text
    assert text.endswith("<|im_start|>assistant\n<|im_end|><|vision_start|>")
    assert "is not of 48x64" in text_of(directory, request.neg_text_ids)


def test_what_is_said_counts(videos):
    request = videos.request(
        VideoPrompt(
            "A hand.",
            width=32,
            height=32,
            num_frames=5,
            seed=7,
            num_inference_steps=2,
            guidance_scale=1.0,
            guidance_interval=(400, 1000),
            flow_shift=3.0,
            sound=True,
        )
    )
    assert request.video_shape == (2, 2, 2)
    assert (request.seed, request.num_inference_steps, request.flow_shift) == (7, 2, 3.0)
    assert (request.guidance_scale, request.guidance_interval) == (1.0, (400, 1000))
    assert (request.sound_frames, request.sound_dim) == (16, 5)


def test_every_request_that_it_makes_is_valid(videos, directory):
    limits = limits_of(videos._config, Cosmos3Args(directory))
    picture = np.zeros((100, 50, 3), np.uint8)
    clip = np.zeros((5, 20, 30, 3), np.uint8)
    for prompt in (
        VideoPrompt("A hand."),
        VideoPrompt("A hand.", num_frames=1),
        VideoPrompt("A hand.", image=picture),
        VideoPrompt("A hand.", clip=clip),
        VideoPrompt("A hand.", clip=clip, num_frames=1),
        VideoPrompt("A hand.", sound=True),
        VideoPrompt("A hand.", seconds=1.0),
    ):
        check_video_request(videos.request(prompt), limits)


def test_an_image_is_the_first_frame(videos):
    image = np.full((96, 96, 3), 255, np.uint8)
    request = videos.request(VideoPrompt("A hand.", image=image))
    assert request.cond_video_pixels.shape == (1, 3, 1, 48, 64)
    assert request.cond_frame_indexes == (0,)
    assert torch.allclose(request.cond_video_pixels, torch.ones(1))
    assert request.flow_shift is None  # the checkpoint's own schedule


def test_the_first_frames_of_a_clip_are_kept(videos):
    clip = np.zeros((5, 48, 64, 3), np.uint8)
    request = videos.request(VideoPrompt("A hand.", clip=clip))
    assert request.cond_video_pixels.shape == (1, 3, 5, 48, 64)
    assert request.cond_frame_indexes == (0, 1)
    assert videos.num_clip_frames == 5


@pytest.mark.parametrize(
    ("seconds", "frames"), [(0.01, 1), (0.5, 5), (1.0, 9), (1.1, 9), (1.5, 13)]
)
def test_a_length_in_seconds_is_the_nearest_that_can_be_made(videos, seconds, frames):
    request = videos.request(VideoPrompt("A hand.", seconds=seconds))
    assert request.video_shape[0] == (frames - 1) // 4 + 1


@pytest.mark.parametrize(
    ("field", "message", "changes"),
    [
        ("num_frames", "77 or 81", {"num_frames": 80}),
        ("width", "multiple of 16: 64 or 80", {"width": 70, "height": 48}),
        ("height", "multiple of 16: 16$", {"width": 64, "height": 5}),
    ],
)
def test_a_size_that_cannot_be_made_is_refused_with_the_nearest(videos, field, message, changes):
    with pytest.raises(InvalidRequestError, match=message) as refused:
        videos.request(VideoPrompt("A hand.", **changes))
    assert refused.value.field == field


def test_a_length_that_no_number_holds_is_refused(videos):
    with pytest.raises(InvalidRequestError, match="make it shorter") as refused:
        videos.request(VideoPrompt("A hand.", seconds=1e308, fps=1000))
    assert refused.value.field == "seconds"


@pytest.mark.parametrize(
    ("message", "settings"),
    [
        ("num_frames=80 must be 1 more than a multiple of 4: 77 or 81", {"num_frames": 80}),
        ("width=70 must be a multiple of 16", {"width": 70}),
        ("height=0 must be from 1", {"height": 0}),
        ("fps=-1.0", {"fps": -1.0}),
        ("num_inference_steps=0", {"num_inference_steps": 0}),
        ("guidance_scale=-1.0", {"guidance_scale": -1.0}),
        ("flow_shift=0.0", {"flow_shift": 0.0}),
        ("seed=-1", {"seed": -1}),
    ],
)
def test_settings_that_no_request_could_have_are_refused(message, settings):
    with pytest.raises(ConfigurationError, match=message):
        video_settings(settings)


def output(frames: int = 9, channels: int = 3) -> Cosmos3Video:
    return Cosmos3Video(torch.rand(1, channels, frames, 48, 64), torch.ones(1, 5, 4))


def test_a_clip_plays(videos):
    av = pytest.importorskip("av", reason="clips need PyAV (phalanx[video])")
    file = videos.file(output(), VideoPrompt("A hand."), None)
    assert file.format is VideoFormat.MP4
    with av.open(io.BytesIO(file.data)) as container:
        stream = container.streams.video[0]
        assert float(stream.average_rate) == 8.0
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]
    assert np.stack(frames).shape == (9, 48, 64, 3)


def test_one_frame_is_a_picture(videos):
    video = output(frames=1)
    file = videos.file(video, VideoPrompt("A hand."), None)
    assert file.media_type == "image/png"
    levels = np.asarray(Image.open(io.BytesIO(file.data)))
    assert (
        np.abs(levels / 255 - video.video[0, :, 0].permute(1, 2, 0).numpy()).max()
        <= 0.5 / 255 + 1e-6
    )


def test_numbers_come_with_their_sound(videos):
    video = output()
    file = videos.file(video, VideoPrompt("A hand.", fps=5.0), VideoFormat.NPZ)
    arrays = np.load(io.BytesIO(file.data))
    assert np.array_equal(arrays["video"], video.video[0].numpy())
    assert arrays["sound"].shape == (5, 4)
    assert arrays["fps"] == 5.0


def test_a_picture_of_many_frames_is_refused(videos):
    with pytest.raises(InvalidRequestError, match="this video 9"):
        videos.file(output(), VideoPrompt("A hand."), VideoFormat.PNG)


@pytest.mark.parametrize("length", [{}, {"num_frames": 5}, {"seconds": 1.0}])
def test_a_picture_of_many_frames_is_refused_before_it_is_computed(videos, length):
    with pytest.raises(InvalidRequestError, match="a PNG has one frame") as refused:
        videos.check_format(VideoPrompt("A hand.", **length), VideoFormat.PNG)
    assert refused.value.field == "response_format"
    videos.check_format(VideoPrompt("A hand.", num_frames=1), VideoFormat.PNG)
    videos.check_format(VideoPrompt("A hand.", **length), VideoFormat.NPZ)


def test_a_video_that_was_ended_is_no_file(videos):
    with pytest.raises(RequestFailedError, match="before the video was complete"):
        videos.file(output(channels=6), VideoPrompt("A hand."), None)


def test_a_server_without_a_tokenizer_says_what_is_missing(directory, tmp_path):
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    elsewhere = tmp_path / "elsewhere"
    (tmp_path / "text_tokenizer").rename(elsewhere)
    with pytest.raises(CheckpointError, match=r"text_tokenizer/tokenizer.json does not exist"):
        Cosmos3.videos(Cosmos3Args(tmp_path), {})
    settings = {"tokenizer_dir": str(elsewhere)}
    assert Cosmos3.videos(Cosmos3Args(tmp_path), settings).request(VideoPrompt("A hand."))


def test_a_pipeline_without_a_systems_turn_has_none(directory, tmp_path):
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    (tmp_path / "model_index.json").write_text(json.dumps({"default_use_system_prompt": False}))
    videos = Cosmos3Videos(Cosmos3Args(tmp_path), video_settings(SMALL))
    request: Cosmos3T2VRequest = videos.request(VideoPrompt("A hand."))
    assert "from a give prompt" not in text_of(tmp_path, request.text_ids)


def test_an_unknown_setting_is_named():
    with pytest.raises(ConfigurationError, match="frames.*known: tokenizer_dir, width"):
        video_settings({"frames": 3})


def test_the_largest_videos_are_those_of_the_arguments(videos, directory):
    assert videos.model_info["max_tokens"] == Cosmos3Args(directory).max_tokens
    assert Cosmos3Sizes().hidden_size == videos.model_info["hidden_size"]
