"""The replica that a key belongs to, the same for everybody who asks and for as long as it is there.

Rendezvous hashing over engine ids: a replica that leaves gives its own keys to others, evenly, and
no other key moves; one that returns gets them back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from phalanx.routing.roles.snapshot import RoleReplica

AFFINITY_HEADER = "x-smg-routing-key"
_MASK = (1 << 64) - 1
_MAX_ENGINES = 16384


class Affinity:
    """Remembers the hashes of engine ids, and nothing of keys."""

    def __init__(self) -> None:
        self._engines: dict[str, int] = {}

    def prefer(
        self, key: str, candidates: Sequence[RoleReplica], exclude: frozenset[str] = frozenset()
    ) -> RoleReplica | None:
        """The candidate of `key` that is not excluded by its `server_id`; None where all are."""
        hashed = _hash(key)
        best: RoleReplica | None = None
        highest = -1
        for replica in candidates:
            if exclude and replica.server_id in exclude:
                continue
            weight = _mixed(hashed ^ self._engine(replica.engine_id))
            if weight > highest:
                best, highest = replica, weight
        return best

    def _engine(self, engine_id: str) -> int:
        known = self._engines.get(engine_id)
        if known is None:
            if len(self._engines) >= _MAX_ENGINES:
                self._engines.clear()
            known = self._engines[engine_id] = _hash(engine_id)
        return known


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest())


def _mixed(value: int) -> int:
    """Every bit of the result depends on every bit of `value` (the finalizer of splitmix64)."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
