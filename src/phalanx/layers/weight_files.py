"""The files that a checkpoint's weights lie in, looked at without reading them, and without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from phalanx.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000


class _Index(msgspec.Struct):
    """Which file holds which tensor."""

    weight_map: dict[str, str]


_Stamp = tuple[tuple[str, int, int, int], ...]


@dataclass(frozen=True)
class WeightOrigin:
    """The directories that weights came from, and what their files were then."""

    directories: tuple[Path, ...]
    stamps: tuple[_Stamp, ...]

    @classmethod
    def of(cls, *directories: Path) -> WeightOrigin:
        return cls(directories, tuple(map(_stamp, directories)))

    @property
    def unchanged(self) -> bool:
        return tuple(map(_stamp, self.directories)) == self.stamps


def _stamp(directory: Path) -> _Stamp:
    """What tells whether files of a directory were written since; a missing one is none."""
    if not directory.is_dir():
        return ()
    stats = [(path.name, path.stat()) for path in sorted(directory.glob("*.safetensors*"))]
    return tuple((name, one.st_ino, one.st_size, one.st_mtime_ns) for name, one in stats)


def check_weight_files(directory: Path, stem: str = "model") -> None:
    """Refuse files that are missing, cut short, or none of safetensors. Raises `CheckpointError`."""
    for path in weight_files(directory, stem):
        try:
            wanted, there = _wanted_bytes(path), path.stat().st_size
        except (OSError, LookupError, TypeError, ValueError, msgspec.DecodeError) as error:
            raise CheckpointError(
                f"{path} is damaged or incomplete: {error}; download or convert it again"
            ) from error
        if wanted != there:
            raise CheckpointError(
                f"{path} is damaged or incomplete: it has {there:,} bytes, and its tensors end at "
                f"{wanted:,}; download or convert it again"
            )


def _wanted_bytes(path: Path) -> int:
    """Where the last tensor ends, as the file's header has it."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if not 0 < size <= MAX_HEADER_BYTES:
            raise ValueError("it does not begin with the header of a safetensors file")
        header = msgspec.json.decode(file.read(size), type=dict[str, dict[str, Any]])
    ends = [one["data_offsets"][1] for name, one in header.items() if name != "__metadata__"]
    return 8 + size + max(ends, default=0)


def weight_files(directory: Path, stem: str = "model") -> list[Path]:
    """All of a checkpoint: `stem`.safetensors, or what its index names.

    Raises `CheckpointError` where one is missing.
    """
    try:
        return _found(directory, stem)
    except OSError as error:
        raise CheckpointError(f"weights cannot be looked for in {directory}: {error}") from error


def _found(directory: Path, stem: str) -> list[Path]:
    index = directory / f"{stem}.safetensors.index.json"
    if index.is_file():
        try:
            content = msgspec.json.decode(index.read_bytes(), type=_Index)
        except (OSError, msgspec.DecodeError) as error:
            raise CheckpointError(f"{index} is not an index of weights: {error}") from error
        files = [directory / name for name in sorted(set(content.weight_map.values()))]
    else:
        files = [directory / f"{stem}.safetensors"]
    for path in files:
        if not path.is_file():
            raise CheckpointError(
                f"weights file {path} does not exist; weights are read from {stem}.safetensors, or "
                f"from the files that {stem}.safetensors.index.json names"
            )
    return files
