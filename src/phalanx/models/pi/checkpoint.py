"""A pi policy's checkpoint directory: its configuration, and its tensors by their plain names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError, safe_open
from torch import Tensor

from phalanx.errors import CheckpointError
from phalanx.models.pi.names import plain_name

WeightRemap = Callable[[str], str | None] | Mapping[str, str] | None
"""Changes names before they are looked up: a function, which drops a tensor by None, or substrings
and what to write in their place.
"""


class _Index(msgspec.Struct):
    """Which file holds which tensor."""

    weight_map: dict[str, str]


def renamed(name: str, remap: WeightRemap) -> str | None:
    """The plain name under which a checkpoint's tensor is looked up; None if it is dropped."""
    if remap is None:
        return plain_name(name)
    if isinstance(remap, Mapping):
        for old, new in remap.items():
            name = name.replace(old, new)
        return plain_name(name)
    found = remap(name)
    return None if found is None else plain_name(found)


class PiCheckpoint:
    """See the module. Nothing is read before it is asked for."""

    def __init__(self, directory: Path, remap: WeightRemap = None) -> None:
        if not directory.is_dir():
            raise CheckpointError(
                f"checkpoint directory {str(directory)!r} does not exist; give a directory of "
                "LeRobot or openpi with model.safetensors"
            )
        self.directory = directory
        self._remap = remap

    def config(self) -> Mapping[str, Any]:
        """`config.json` as it is; nothing where there is none."""
        path = self.directory / "config.json"
        if not path.is_file():
            return {}
        try:
            return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        except (OSError, msgspec.DecodeError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all tensors. Raises `CheckpointError` where two get the same name."""
        found: dict[str, tuple[int, ...]] = {}
        for path in self._files():
            with _opened(path) as file:
                for stored in file.keys():  # noqa: SIM118 - not a mapping
                    name = renamed(stored, self._remap)
                    if name in found:
                        raise CheckpointError(
                            f"{path}: {stored!r} becomes {name!r}, which is there already; "
                            "weight_remap must keep names apart"
                        )
                    if name is not None:
                        found[name] = tuple(file.get_slice(stored).get_shape())
        return found

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors, one at a time."""
        for path in self._files():
            with _opened(path) as file:
                for stored in file.keys():  # noqa: SIM118 - not a mapping
                    name = renamed(stored, self._remap)
                    if name is not None:
                        yield name, file.get_tensor(stored)

    def _files(self) -> list[Path]:
        index = self.directory / "model.safetensors.index.json"
        files = [self.directory / "model.safetensors"]
        if index.is_file():
            try:
                content = msgspec.json.decode(index.read_bytes(), type=_Index)
            except (OSError, msgspec.DecodeError) as error:
                raise CheckpointError(f"{index} is not an index of weights: {error}") from error
            files = [self.directory / name for name in sorted(set(content.weight_map.values()))]
        for path in files:
            if not path.is_file():
                raise CheckpointError(f"weights file {path} does not exist")
        return files


def _opened(path: Path) -> Any:  # noqa: ANN401 - safetensors has no types
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is damaged or incomplete: {error}; download or convert it again"
        ) from error
