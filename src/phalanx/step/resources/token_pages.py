"""The tokens of a request as pages: each full page has a digest of all tokens up to its end."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

DIGEST_BYTES = 16


class TokenPages:
    """Digests are chained and made when they are first asked for. They depend on nothing but the
    tokens, the page size and `salt`, so they are equal in every process.

    `token_ids` may grow at its end while this object lives.
    """

    def __init__(self, token_ids: Sequence[int], page_size: int, salt: str) -> None:
        self._token_ids = token_ids
        self._page_size = page_size
        self._first = _digest(salt.encode())
        self._digests: list[bytes] = []

    def __len__(self) -> int:
        """How many full pages the tokens make."""
        return len(self._token_ids) // self._page_size

    def digest(self, index: int) -> bytes:
        """What tells page `index`, and all before it, from any other."""
        while len(self._digests) <= index:
            start = len(self._digests) * self._page_size
            ids = self._token_ids[start : start + self._page_size]
            assert len(ids) == self._page_size, f"page {index} is not full"
            parent = self._digests[-1] if self._digests else self._first
            self._digests.append(_digest(parent + np.array(ids, dtype="<i8").tobytes()))
        return self._digests[index]


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()
