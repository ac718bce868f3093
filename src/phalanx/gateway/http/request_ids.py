"""Each request's id: the caller's own where it is usable, else a new one."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator

MAX_LENGTH = 128
_ENDS = tuple(b"%03x" % number for number in range(16**3))
"""An id's last digits: only the others are written anew, and that seldom."""


class RequestIds:
    """New ids share a random beginning, so that those of two gateways differ."""

    def __init__(self) -> None:
        self._prefix = secrets.token_hex(10).encode()
        self._begun = itertools.count()
        self._begin = b""
        self._ends: Iterator[bytes] = iter(())

    def of(self, given: bytes | None) -> bytes:
        if given and len(given) <= MAX_LENGTH and given.isascii() and given.strip() == given:
            return given
        end = next(self._ends, None)
        if end is None:
            self._begin = b"%b%09x" % (self._prefix, next(self._begun))
            self._ends = iter(_ENDS)
            end = next(self._ends)
        return self._begin + end
