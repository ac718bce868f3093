"""A role's documents as bytes, encoded once a revision for everybody who asks."""

from __future__ import annotations

import gzip

import msgspec

from phalanx.routing.roles.documents import discovery, internal
from phalanx.routing.roles.snapshot import RoleSnapshot
from phalanx.wire.discovery import encode_document

MIN_COMPRESSED_BYTES = 1024
LEVEL = 1
"""Of compression: most of the gain at little of the cost; documents repeat themselves much."""


class EncodedSnapshot:
    """The bytes of one snapshot; each kind is made when it is first asked for.

    `stale` says in the public document why nothing newer is known, or is empty.
    """

    def __init__(self, snapshot: RoleSnapshot, stale: str = "") -> None:
        self.snapshot = snapshot
        self.stale = stale
        self._discovery: bytes | None = None
        self._compressed: bytes | None = None
        self._internal: bytes | None = None

    @property
    def discovery(self) -> bytes:
        """The public document."""
        if self._discovery is None:
            document = discovery(self.snapshot)
            if self.stale:
                document = msgspec.structs.replace(document, stale=self.stale)
            self._discovery = encode_document(document)
        return self._discovery

    @property
    def compressed(self) -> bytes | None:
        """The public document for who accepts gzip; None where that is not worth it."""
        if self._compressed is None and len(self.discovery) >= MIN_COMPRESSED_BYTES:
            self._compressed = gzip.compress(self.discovery, LEVEL, mtime=0)
        return self._compressed

    @property
    def internal(self) -> bytes:
        """The document for the role's own gateway."""
        if self._internal is None:
            self._internal = encode_document(internal(self.snapshot))
        return self._internal


class EncodedDocuments:
    """The bytes of a role's newest snapshot, shared by all who ask. Belongs to one event loop."""

    def __init__(self) -> None:
        self._newest: EncodedSnapshot | None = None

    def of(self, snapshot: RoleSnapshot, stale: str = "") -> EncodedSnapshot:
        """As `EncodedSnapshot`, the same object for the same snapshot and words."""
        newest = self._newest
        if newest is None or newest.snapshot is not snapshot or newest.stale != stale:
            newest = self._newest = EncodedSnapshot(snapshot, stale)
        return newest
