"""How a stream of items is cut into chunks for its consumer: which items each chunk holds.

A policy is a frozen value; all that it says follows from a chunk's number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from phalanx.errors import ConfigurationError


class ChunkPolicy(Protocol):
    """Which items make up the chunks of a stream."""

    @property
    def continue_after_done(self) -> bool:
        """Whether empty chunks follow for ever when the stream has ended, and none is final."""
        ...

    def bounds(self, index: int) -> tuple[int, int]:
        """The number of the first item of full chunk `index`, and of the first one behind it."""
        ...


def _check(policy: ChunkPolicy, field: str, value: int, low: int, high: int | None = None) -> None:
    if value < low or (high is not None and value > high):
        bound = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ConfigurationError(f"{policy}: {field}={value} must be {bound}")


@dataclass(frozen=True)
class Sliding:
    """Windows of `window` items, each beginning `stride` items behind the one before."""

    window: int
    stride: int
    continue_after_done = False

    def __post_init__(self) -> None:
        _check(self, "window", self.window, 1)
        _check(self, "stride", self.stride, 1, self.window)

    def bounds(self, index: int) -> tuple[int, int]:
        first = index * self.stride
        return first, first + self.window


@dataclass(frozen=True)
class LeftContext:
    """`chunk` new items at a time, led by up to `context` items that earlier chunks had too."""

    chunk: int
    context: int
    continue_after_done = False

    def __post_init__(self) -> None:
        _check(self, "chunk", self.chunk, 1)
        _check(self, "context", self.context, 0)

    def bounds(self, index: int) -> tuple[int, int]:
        first_new = index * self.chunk
        return max(0, first_new - self.context), first_new + self.chunk


@dataclass(frozen=True)
class Fixed:
    """`size` items at a time, each in one chunk.

    With `continue_after_done` the consumer is never told of an end: it gets empty chunks from then
    on, and its own model decides when to stop.
    """

    size: int
    continue_after_done: bool = False

    def __post_init__(self) -> None:
        _check(self, "size", self.size, 1)

    def bounds(self, index: int) -> tuple[int, int]:
        return index * self.size, (index + 1) * self.size
