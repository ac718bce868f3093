"""What the conformance checks raise."""

from __future__ import annotations


class ConformanceError(AssertionError):
    """The plugin broke its contract; the message says where."""


def require(condition: bool, message: str) -> None:
    """Raise unless the contract holds here."""
    if not condition:
        raise ConformanceError(message)
