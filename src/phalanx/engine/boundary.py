"""The only two places that catch broadly: around plugin code, and around the steps of a close."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Raised:
    """What a call into a plugin raised instead of returning."""

    error: BaseException


def attempt(call: Callable[[], T]) -> T | Raised:
    """Run plugin code; whatever it raises is the outcome of a request or of the replica."""
    try:
        return call()
    except BaseException as error:  # noqa: BLE001 - the plugin boundary
        return Raised(error)


def run_every(steps: Iterable[Callable[[], None]]) -> None:
    """Run every step of a close, then raise the first error that one of them raised."""
    first: BaseException | None = None
    for step in steps:
        try:
            step()
        except BaseException as error:  # noqa: BLE001 - a later step must still run
            first = first or error
    if first is not None:
        raise first
