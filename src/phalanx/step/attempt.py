"""The boundary around code of nodes and resources: what it raises becomes a value.

This is one of the two places that catch broadly; everything else lets exceptions pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
Item = TypeVar("Item")


@dataclass(frozen=True)
class Attempt(Generic[T]):
    """What a call returned, or what it raised."""

    value: T | None = None
    error: Exception | None = None


def attempt(call: Callable[[], T]) -> Attempt[T]:
    """Call and keep either result; interrupts and exits pass through."""
    try:
        return Attempt(value=call())
    except Exception as error:  # noqa: BLE001 - the boundary around plugin code
        return Attempt(error=error)


def attempt_each(
    call: Callable[[Item], T], items: Iterable[Item]
) -> list[tuple[Item, T | None, Exception | None]]:
    """Call with each item; what it returned, or what it raised, beside the item."""
    results: list[tuple[Item, T | None, Exception | None]] = []
    for item in items:
        try:
            results.append((item, call(item), None))
        except Exception as error:  # noqa: BLE001 - the boundary around plugin code
            results.append((item, None, error))
    return results
