"""References were computed on one thread."""

from __future__ import annotations

import pytest

from tests.models.pi.stored import one_thread


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield
