"""Reads the small files of a checkpoint directory, with errors that name the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from phalanx.errors import CheckpointError


def read_text(path: Path) -> str | None:
    """The file's text, None where it does not exist."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def read_json(path: Path, *, required: bool) -> dict[str, Any]:
    """The file's JSON object; empty where it does not exist and is not required."""
    text = read_text(path)
    if text is None:
        if required:
            raise CheckpointError(f"{path} does not exist; a checkpoint directory needs it")
        return {}
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{path} is not a JSON object: {error}") from error
