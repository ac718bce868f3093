"""Each request's id: the caller's own where it is usable, else a new one."""

from __future__ import annotations

import itertools
import secrets

MAX_LENGTH = 128


class RequestIds:
    """New ids share a random beginning, so that those of two gateways differ."""

    def __init__(self) -> None:
        self._prefix = secrets.token_hex(10).encode()
        self._numbers = itertools.count(1)

    def of(self, given: bytes | None) -> bytes:
        if given and len(given) <= MAX_LENGTH and given.isascii() and given.strip() == given:
            return given
        return b"%b%012x" % (self._prefix, next(self._numbers))
