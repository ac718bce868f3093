"""Which names stand for which camera, and what is said of others."""

from __future__ import annotations

import pytest

from phalanx.errors import ConfigurationError, InvalidRequestError
from phalanx.processing.policy.camera_names import CameraNames

KEYS = tuple(f"observation.images.{name}" for name in ("front", "wrist", "empty_camera_0"))


def test_a_camera_has_the_checkpoints_key_and_its_end():
    names = CameraNames(KEYS)
    assert names.key("front") == names.key("observation.images.front") == KEYS[0]
    assert names.shown == ("front", "wrist")


def test_the_robots_own_names_stand_for_the_cameras_in_their_order():
    names = CameraNames(KEYS, ["main_images", "wrist_images"])
    assert names.by_key(["wrist_images", "main_images"]) == {
        KEYS[0]: "main_images",
        KEYS[1]: "wrist_images",
    }
    assert names.shown == ("main_images", "wrist_images")


def test_the_robots_name_wins_over_another_cameras_end():
    assert CameraNames(KEYS, ["wrist"]).key("wrist") == KEYS[0]


def test_names_that_the_checkpoint_renames_are_known():
    names = CameraNames(KEYS, renamed={"observation.images.top": KEYS[0]})
    assert names.key("top") == names.key("observation.images.top") == KEYS[0]


def test_an_unknown_camera_is_refused_with_those_that_there_are():
    with pytest.raises(
        InvalidRequestError, match=r"'top'; this policy takes 'front', 'wrist'"
    ) as e:
        CameraNames(KEYS).key("top")
    assert e.value.field == "top"


def test_two_names_of_one_camera_are_refused():
    with pytest.raises(InvalidRequestError, match="are the same camera"):
        CameraNames(KEYS).by_key(["front", KEYS[0]])


@pytest.mark.parametrize("given", [["a", "b", "c", "d"], ["a", "a"]])
def test_names_that_cannot_be_the_cameras_are_refused(given):
    with pytest.raises(ConfigurationError, match="image_names"):
        CameraNames(KEYS, given)
