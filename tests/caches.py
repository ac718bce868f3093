"""Cache folders of tests' own."""

from __future__ import annotations

from pathlib import Path

from phalanx import settings


def own_cache(folder: Path) -> Path:
    """An empty cache folder, but for the native operators: these are built once a machine."""
    folder.mkdir(parents=True, exist_ok=True)
    operators = settings.cache_dir() / "operators"
    operators.mkdir(parents=True, exist_ok=True)
    link = folder / "operators"
    if not link.exists():
        link.symlink_to(operators)
    return folder
