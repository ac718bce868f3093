"""The texts that the model reads, word for word as diffusers' pipeline made them."""

from __future__ import annotations

import json

import pytest
from tokenizers import AddedToken, Tokenizer

from phalanx.errors import CheckpointError, InvalidRequestError
from phalanx.models.cosmos3.prompt import (
    SYSTEM_VIDEO,
    VISION_START,
    Format,
    PromptTokenizer,
    action_prompt,
    media_prompt,
    plain_action_prompt,
)
from phalanx.testing.tiny_tokenizer import write_byte_level_tokenizer

HD = Format(frames=189, fps=24.0, height=720, width=1280)
SHORT = Format(frames=9, fps=16.0, height=48, width=64)
IMAGE = Format(frames=1, fps=24.0, height=720, width=1280)


@pytest.mark.parametrize(
    ("text", "format", "prompt"),
    [
        (
            "A cat",
            HD,
            "A cat. The video is 7.9 seconds long and is of 24 FPS. This video is of 720x1280 "
            "resolution.",
        ),
        (
            "A cat..",
            SHORT,
            "A cat. The video is 0.6 seconds long and is of 16 FPS. This video is of 48x64 "
            "resolution.",
        ),
        (
            "",
            SHORT,
            "The video is 0.6 seconds long and is of 16 FPS. This video is of 48x64 resolution.",
        ),
        ("A cat", IMAGE, "A cat. This image is of 720x1280 resolution."),
        ("A cat. ", IMAGE, "A cat. . This image is of 720x1280 resolution."),
    ],
)
def test_a_prompt_says_how_long_and_large(text, format, prompt):
    assert media_prompt(text, format) == prompt


@pytest.mark.parametrize(
    ("text", "format", "prompt"),
    [
        (
            "bad",
            SHORT,
            "bad. The video is not 0.6 seconds long and is not of 16 FPS. This video is not of "
            "48x64 resolution.",
        ),
        ("", IMAGE, "This image is not of 720x1280 resolution."),
    ],
)
def test_a_negative_prompt_says_what_it_is_not(text, format, prompt):
    assert media_prompt(text, format, negative=True) == prompt


def test_sentences_can_be_left_out():
    format = Format(frames=9, fps=12.5, height=48, width=64)
    duration = media_prompt("A cat", format, resolution=False)
    assert duration == "A cat. The video is 0.7 seconds long and is of 12 FPS."
    resolution = media_prompt("A cat", format, duration=False)
    assert resolution == "A cat. This video is of 48x64 resolution."
    assert media_prompt("A cat.", format, duration=False, resolution=False) == "A cat."


@pytest.mark.parametrize(
    ("text", "format", "viewpoint", "prompt"),
    [
        (
            "pick it up",
            Format(33, 15.0, 256, 320),
            "ego_view",
            '{"cinematography": {"framing": "This video is captured from a first-person '
            'perspective looking at the scene."}, "actions": [{"time": "0:00-0:02", '
            '"description": "pick it up."}], "duration": "2s", "fps": 15.0, "resolution": '
            '{"H": 256, "W": 320}, "aspect_ratio": "4,3"}',
        ),
        (
            "pick it up?",
            Format(1000, 10, 192, 320),
            None,
            '{"actions": [{"time": "0:00-1:40", "description": "pick it up?"}], "duration": '
            '"100s", "fps": 10.0, "resolution": {"H": 192, "W": 320}, "aspect_ratio": "16,9"}',
        ),
        (
            ' é "x", ',
            Format(40, 29.97, 640, 640),
            None,
            '{"actions": [{"time": "0:00-0:01", "description": "\\u00e9 \\"x\\",."}], '
            '"duration": "1s", "fps": 29.97, "resolution": {"H": 640, "W": 640}, '
            '"aspect_ratio": "1,1"}',
        ),
        (
            "",
            Format(33, 15.0, 832, 480),
            "concat_view",
            '{"cinematography": {"framing": "This video contains concatenated views from '
            'multiple camera perspectives."}, "actions": [{"time": "0:00-0:02", "description": '
            '""}], "duration": "2s", "fps": 15.0, "resolution": {"H": 832, "W": 480}, '
            '"aspect_ratio": "9,16"}',
        ),
    ],
)
def test_the_prompt_of_an_action_is_json(text, format, viewpoint, prompt):
    assert action_prompt(text, format, viewpoint) == prompt


@pytest.mark.parametrize(
    ("frames", "fps", "ends", "lasts"),
    [
        (25, 10.0, "0:02", "2s"),
        (35, 10.0, "0:04", "3s"),
        (26, 10.0, "0:03", "2s"),
        (599, 10.0, "1:00", "59s"),
        (36001, 10.0, "60:00", "3600s"),
    ],
)
def test_its_end_is_rounded_and_its_duration_cut(frames, fps, ends, lasts):
    caption = json.loads(action_prompt("go", Format(frames, fps, 256, 256)))
    assert (caption["actions"][0]["time"], caption["duration"]) == (f"0:00-{ends}", lasts)


def test_a_policy_of_droid_reads_sentences():
    assert plain_action_prompt("Pick it up.", Format(33, 15.0, 480, 832), "wrist_view") == (
        "Pick it up. This video is captured from a wrist-mounted camera. The video is 2.2 seconds "
        "long and is of 15 FPS. This video is of 480x832 resolution."
    )


def test_an_unknown_viewpoint_is_refused():
    with pytest.raises(InvalidRequestError, match="viewpoint='top'; allowed: ego_view, third"):
        action_prompt("go", Format(33, 15.0, 256, 256), "top")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("texts")
    (directory / "text_tokenizer").mkdir()
    folder = write_byte_level_tokenizer(directory / "text_tokenizer")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(VISION_START, special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return directory


def test_a_text_ends_in_the_two_markers_of_a_video(checkpoint):
    tokenizer = PromptTokenizer(checkpoint)
    ids = tokenizer.encode("A cat")
    inner = Tokenizer.from_file(str(checkpoint / "text_tokenizer" / "tokenizer.json"))
    assert ids[-2:] == [inner.token_to_id("<|im_end|>"), inner.token_to_id(VISION_START)]
    text = inner.decode(ids, skip_special_tokens=False)
    assert text == (
        "<|im_start|>user\nA cat<|im_end|>\n<|im_start|>assistant\n<|im_end|><|vision_start|>"
    )


def test_a_system_turn_comes_first(checkpoint):
    tokenizer = PromptTokenizer(checkpoint)
    ids, plain = tokenizer.encode("A cat", SYSTEM_VIDEO), tokenizer.encode("A cat")
    assert ids[-len(plain) :] == plain
    inner = Tokenizer.from_file(str(checkpoint / "text_tokenizer" / "tokenizer.json"))
    before = inner.decode(ids[: -len(plain)], skip_special_tokens=False)
    assert before == f"<|im_start|>system\n{SYSTEM_VIDEO}<|im_end|>\n"


def test_tokenizers_that_cannot_read_prompts_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="text_tokenizer does not exist"):
        PromptTokenizer(tmp_path)
    (tmp_path / "text_tokenizer").mkdir()
    write_byte_level_tokenizer(tmp_path / "text_tokenizer")
    with pytest.raises(CheckpointError, match=r"no token <\|vision_start\|>"):
        PromptTokenizer(tmp_path)
