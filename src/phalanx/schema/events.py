"""What a batching plugin reports of its requests, in order, after each tick of its loop."""

from __future__ import annotations

from typing import Any

import msgspec


class Scheduled(msgspec.Struct, frozen=True):
    """The request's first step has begun; comes at most once and before any delta."""

    rid: str


class Delta(msgspec.Struct, frozen=True):
    """A part of the request's output."""

    rid: str
    payload: Any


class Final(msgspec.Struct, frozen=True):
    """The request ended well (or was cancelled); `payload` is its complete output."""

    rid: str
    payload: Any
    cancelled: bool = False


class Failed(msgspec.Struct, frozen=True):
    """The request ended in an error of its own; the loop goes on."""

    rid: str
    error: Exception


Event = Scheduled | Delta | Final | Failed
"""Every started request yields exactly one `Final` or `Failed`, as its last event."""
