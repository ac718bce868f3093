"""The checkpoints that the fixtures were computed with, as folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.cosmos3.stored import checkpoint


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A pipeline's directory by the family of its transformer; nobody may change it."""
    return {
        family: checkpoint(tmp_path_factory.mktemp(family), family) for family in ("silu", "relu2")
    }
