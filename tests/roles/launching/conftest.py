from __future__ import annotations

from pathlib import Path

import pytest

from tests.roles.launching.specs import write_tiny_llama


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def other_tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the same shapes, with other weights."""
    return write_tiny_llama(tmp_path_factory.mktemp("other-tiny-llama"), seed=1)
