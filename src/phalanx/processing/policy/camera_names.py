"""Which name of an observation's image stands for which camera of the checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from phalanx.errors import ConfigurationError, InvalidRequestError
from phalanx.processing.policy.transition import IMAGE_PREFIX

_EMPTY = f"{IMAGE_PREFIX}empty_camera_"
"""LeRobot's name of a place that the checkpoint has for a camera that its robots lack."""


class CameraNames:
    """A camera is named by the checkpoint's key, by what follows `observation.images.` in it, or by
    the robot's own name: the i-th of `image_names` is the checkpoint's i-th camera. `renamed` are
    names that the pre-processor turns into others.
    """

    def __init__(
        self,
        keys: Iterable[str],
        image_names: Sequence[str] = (),
        renamed: Mapping[str, str] | None = None,
    ) -> None:
        """Raises `ConfigurationError` for more `image_names` than there are cameras."""
        self._keys = tuple(keys)
        real = [key for key in self._keys if not key.startswith(_EMPTY)]
        if len(image_names) > len(self._keys) or len(set(image_names)) < len(image_names):
            raise ConfigurationError(
                f"image_names={list(image_names)!r} must be different names of at most "
                f"{len(self._keys)} cameras; the checkpoint has {', '.join(self._keys) or 'none'}"
            )
        given = dict(zip(self._keys, image_names, strict=False))
        self._shown = tuple(given.get(key, short_name(key)) for key in real)
        self._names: dict[str, str] = {}
        for old, new in (renamed or {}).items():
            if new in self._keys:
                self._names[old] = self._names[short_name(old)] = new
        for key in self._keys:
            self._names[key] = self._names[short_name(key)] = key
        for key, name in given.items():
            self._names[name] = key

    @property
    def shown(self) -> tuple[str, ...]:
        """One name of each camera that a robot may have, in the checkpoint's order."""
        return self._shown

    def key(self, name: str) -> str:
        """The checkpoint's camera. Raises `InvalidRequestError` with the names that it has."""
        key = self._names.get(name)
        if key is None:
            wanted = ", ".join(repr(shown) for shown in self._shown) or "no images"
            raise InvalidRequestError(
                f"there is no camera {name!r}; this policy takes {wanted}. Name the robot's "
                "cameras so, or list its names in image_names of the server's adapter.args",
                field=name,
            )
        return key

    def by_key(self, names: Iterable[str]) -> dict[str, str]:
        """The name that was given for each camera; two names of the same one are refused."""
        found: dict[str, str] = {}
        for name in names:
            key = self.key(name)
            if key in found:
                raise InvalidRequestError(
                    f"images {found[key]!r} and {name!r} are the same camera {key!r}; send one",
                    field=name,
                )
            found[key] = name
        return {key: found[key] for key in self._keys if key in found}


def short_name(key: str) -> str:
    """A checkpoint's camera as its robot calls it."""
    return key.removeprefix(IMAGE_PREFIX)
