"""Mistakes that a port of one forward can make: what is wrong, and the errors that are known of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.models.cosmos3.standing_in import (
    TOLERANCE,
    Forward,
    errors,
    known_ids,
    known_row,
    loaded,
)


def forward(directory: Path, family: str = "silu") -> Forward:
    return Forward.of(loaded(directory), known_ids(family), known_row(family))


def worst(run: Forward, family: str = "silu") -> tuple[float, float, float]:
    """The largest errors of vision, sound and action."""
    found = errors(run.run(), family)
    return found["vision"], found["sound"], found["action"]


@dataclass(frozen=True)
class Mistake:
    """What is wrong, and the errors that it makes."""

    name: str
    make: Callable[..., object]
    errors: tuple[float, float, float]

    def __str__(self) -> str:
        return self.name


def check(found: tuple[float, float, float], known: tuple[float, float, float]) -> None:
    """All are far above the tolerance, and the errors that this mistake makes."""
    assert min(found) > 2 * TOLERANCE
    assert found == pytest.approx(known, rel=0.06)
