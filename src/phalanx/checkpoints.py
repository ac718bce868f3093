"""Where a model's files are: a directory, or a name of the `phalanx.checkpoints` group.

A name belongs to an installed package that prepares the model's directory in the cache the first
time it is asked for (`phalanx.schema.checkpoints`).
"""

from __future__ import annotations

import difflib
import re
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from phalanx import settings
from phalanx.errors import ConfigurationError
from phalanx.schema.checkpoints import CheckpointSource, Progress

ENTRY_POINT_GROUP = "phalanx.checkpoints"
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def checkpoint_names() -> tuple[str, ...]:
    """The known names, sorted."""
    return tuple(sorted(_points()))


def check_checkpoint(model: str | Path) -> None:
    """Refuse what is neither an existing directory nor a known name; prepares nothing."""
    if Path(model).is_dir() or str(model) in _points():
        return
    if Path(model).exists():
        raise ConfigurationError(
            f"model {str(model)!r} is a file; give the directory that holds it"
        )
    known = checkpoint_names()
    if _looks_like_path(str(model)):
        raise ConfigurationError(
            f"model directory {str(model)!r} does not exist; give an existing directory"
            f" or one of the names {', '.join(known)}{_of_a_hub(str(model))}"
        )
    nearest = difflib.get_close_matches(str(model), known, n=1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else "."
    raise ConfigurationError(
        f"model {str(model)!r} is neither a directory nor a known name;"
        f" known names: {', '.join(known) or 'none'}{hint}"
        f" A directory beside the configuration file is ./{model} there"
    )


def checkpoint_dir(model: str | Path, progress: Progress | None = None) -> Path:
    """The directory of `model`, prepared first where it is a name; an existing directory wins.

    The last part of its path names the model: `.` and `..` become the directories they mean.

    Raises `ConfigurationError` for an unknown name and what the name's source raises.
    """
    check_checkpoint(model)
    if Path(model).is_dir():
        return _named(Path(model))
    source: CheckpointSource = _points()[str(model)].load()
    return source(settings.cache_dir(), _silent if progress is None else progress)


def _points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}


def _named(directory: Path) -> Path:
    return directory.resolve() if directory.name in ("", "..") else directory


def _looks_like_path(model: str) -> bool:
    return model.startswith((".", "~")) or "/" in model


def _of_a_hub(model: str) -> str:
    """What to do where it may be the name of a model on a hub."""
    if not _HUB_NAME.fullmatch(model):
        return ""
    name = model.rpartition("/")[2]
    return (
        f"; nothing is downloaded from model hubs: `hf download {model} --local-dir {name}` makes"
        f" the directory ./{name} of a model there"
    )


def _silent(done: int, total: int) -> None:
    """Nobody wants to know."""
