"""`lerobot_features`: which joints make up a robot's state, and which cameras it has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from phalanx.errors import MalformedRequestError
from phalanx.wire.lerobot.pickle_reader import Value

STATE: Final = "observation.state"
IMAGES: Final = "observation.images."

MAX_CAMERAS: Final = 32
MAX_JOINTS: Final = 4096
MAX_CHARACTERS: Final = 1024 * 1024
_MAX_VALUES: Final = 4 * MAX_JOINTS
_MAX_DEPTH: Final = 6
_IMAGE_DTYPES = ("image", "video")

Plain = None | bool | int | float | str | list["Plain"] | dict[str, "Plain"]
"""What JSON can say."""


@dataclass(frozen=True)
class Camera:
    """`key` is the policy's name of it, `name` what the robot calls it in an observation."""

    key: str
    name: str
    shape: tuple[int, int, int]


@dataclass(frozen=True)
class Features:
    """`state_names` in the order of the state; `declared` is all of it, as JSON values."""

    state_names: tuple[str, ...]
    cameras: tuple[Camera, ...]
    declared: Mapping[str, Plain]


class Allowance:
    """What may still be copied of one client's settings.

    A text counts as often as it is named, since a pickle may name the same one many times over, and
    JSON writes each of them.
    """

    def __init__(self) -> None:
        self._values = _MAX_VALUES
        self._characters = MAX_CHARACTERS

    def spend(self, name: str, value: Value) -> None:
        self._values -= 1
        if self._values < 0:
            raise _wrong(name, "has too many values")
        if isinstance(value, str):
            self._characters -= len(value)
            if self._characters < 0:
                raise _wrong(
                    name, f"has texts of more than {MAX_CHARACTERS} characters with those before it"
                )


def decode_features(value: Value, allowance: Allowance) -> Features:
    """Raises `MalformedRequestError`."""
    declared = plain(value, "lerobot_features", allowance)
    if not isinstance(declared, dict):
        raise _wrong("lerobot_features", "is no dictionary")
    cameras = tuple(
        _camera(key, feature) for key, feature in declared.items() if key.startswith(IMAGES)
    )
    if len(cameras) > MAX_CAMERAS:
        raise _wrong("lerobot_features", f"has {len(cameras)} cameras; at most {MAX_CAMERAS}")
    names = _state_names(declared[STATE]) if STATE in declared else ()
    return Features(names, cameras, declared)


def plain(value: Value, name: str, allowance: Allowance) -> Plain:
    """The same as JSON values. Raises `MalformedRequestError` for any other, or for too many."""
    return _plain(value, name[:80], allowance, 0)


def _plain(value: Value, name: str, allowance: Allowance, depth: int) -> Plain:
    allowance.spend(name, value)
    if depth > _MAX_DEPTH:
        raise _wrong(name, "has too deep values")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(entry, name, allowance, depth + 1) for entry in value]
    if isinstance(value, dict):
        copied = {}
        for key, entry in value.items():
            allowance.spend(name, key)
            copied[key] = _plain(entry, name, allowance, depth + 1)
        return copied
    raise _wrong(name, "holds more than numbers, texts, lists and dictionaries")


def _camera(key: str, feature: Plain) -> Camera:
    if not isinstance(feature, dict) or feature.get("dtype") not in _IMAGE_DTYPES:
        raise _wrong(key, "is no image")
    shape = feature.get("shape")
    if (
        not isinstance(shape, list)
        or len(shape) != 3
        or not all(type(length) is int and 1 <= length <= 1 << 16 for length in shape)
    ):
        raise _wrong(key, "has no shape of height, width and channels")
    height, width, channels = (int(str(length)) for length in shape)
    return Camera(key, key.removeprefix(IMAGES), (height, width, channels))


def _state_names(feature: Plain) -> tuple[str, ...]:
    names = feature.get("names") if isinstance(feature, dict) else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise _wrong(STATE, "has no list of names")
    if len(names) > MAX_JOINTS:
        raise _wrong(STATE, f"has {len(names)} names; at most {MAX_JOINTS}")
    return tuple(str(name) for name in names)


def _wrong(name: str, what: str) -> MalformedRequestError:
    return MalformedRequestError(f"the policy instructions' {name[:80]!r} {what}", field=name[:80])
