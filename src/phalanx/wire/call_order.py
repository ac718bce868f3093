"""The header by which an engine's manager numbers calls that take memory or give it back, so that none
is done after a later one. Servers of other makes ignore it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from phalanx.errors import InvalidRequestError

HEADER = "x-phalanx-call"


@dataclass(frozen=True)
class CallNumber:
    """`number` counts the calls of one `caller`, which has a name of its own."""

    caller: str
    number: int

    def __str__(self) -> str:
        return f"{self.caller}/{self.number}"

    @classmethod
    def parse(cls, header: str) -> Self:
        """Raises `InvalidRequestError`."""
        caller, _, number = header.rpartition("/")
        if not caller or len(header) > 100 or not (number.isascii() and number.isdecimal()):
            raise InvalidRequestError(
                f"{HEADER}={header[:100]!r} must be CALLER/NUMBER, as a1b2/17", field=HEADER
            )
        return cls(caller, int(number))
