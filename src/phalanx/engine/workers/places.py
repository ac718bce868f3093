"""Puts a payload's bytes where its readers find them, and takes them from there: in the packet
where they are few, else in the shared arena, else in a shared-memory file of their own.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any, NamedTuple

from phalanx.engine.workers.arena import ArenaReader, ArenaWriter
from phalanx.engine.workers.messages import PayloadRef, Place
from phalanx.engine.workers.packets import Descriptor, MemoryFile, close_all
from phalanx.engine.workers.payload import Bytes, EncodedPayload, decode

MAX_PACKET_PAYLOAD_BYTES = 8192


class PlacedPayload(NamedTuple):
    """Where a payload is, and the files that must be sent along."""

    ref: PayloadRef
    descriptors: Sequence[Descriptor]


class PayloadWriter:
    """Places payloads for all readers of an arena; not safe to share between threads."""

    def __init__(self, arena: ArenaWriter) -> None:
        self._arena = arena

    def place(self, encoded: EncodedPayload) -> PlacedPayload:
        """Copy a payload; raises OSError where no file can be made for one that needs it."""
        sizes, by_handle = encoded.sizes, encoded.by_handle
        if encoded.num_bytes <= MAX_PACKET_PAYLOAD_BYTES:
            data = b"".join(encoded.chunks)
            ref = PayloadRef(Place.PACKET, sizes, data=data, by_handle=by_handle)
            return PlacedPayload(ref, encoded.descriptors)
        written = self._arena.write(encoded.chunks, encoded.num_bytes)
        if written is None:
            return place_in_file(encoded)
        ref = PayloadRef(Place.ARENA, sizes, *written, by_handle=by_handle)
        return PlacedPayload(ref, encoded.descriptors)


def place_in_file(encoded: EncodedPayload) -> PlacedPayload:
    """Copy a payload into a file of its own, which readers may take in any order among others.

    Raises OSError where none can be made.
    """
    file = MemoryFile(encoded.chunks)
    ref = PayloadRef(Place.FILE, encoded.sizes, by_handle=encoded.by_handle)
    return PlacedPayload(ref, (*encoded.descriptors, file))


class PayloadReader:
    """Takes payloads as one of an arena's readers; not safe to share between threads.

    `borrows`: arrays stay in the arena, where they are written to by nobody else, for as long as
    they live. Only for an arena with one reader.
    """

    def __init__(self, arena: ArenaReader, reader: int = 0, *, borrows: bool = False) -> None:
        self._arena = arena
        self._reader = reader
        self._borrows = borrows

    def take(self, ref: PayloadRef, descriptors: list[int]) -> Any:
        """The object, in memory that is its own or lent to it. Closes the descriptors; raises what decoding raises."""
        try:
            match ref.place:
                case Place.PACKET:
                    return self._decode(memoryview(ref.data), ref, descriptors)
                case Place.ARENA:
                    num_bytes = ref.num_bytes
                    body = self._arena.view(ref.position, num_bytes)
                    lent = None
                    if self._borrows and len(ref.sizes) > 1:
                        lent = self._arena.borrow(ref.position, num_bytes, ref.sequence)
                    try:
                        return self._decode(body, ref, descriptors, lent)
                    finally:
                        self._arena.release(ref.sequence)
                case Place.FILE:
                    file = mmap.mmap(descriptors[-1], ref.num_bytes, prot=mmap.PROT_READ)
                    return self._decode(memoryview(file), ref, descriptors)
        finally:
            if descriptors:
                close_all(descriptors)

    def _decode(
        self,
        body: memoryview,
        ref: PayloadRef,
        descriptors: list[int],
        lent: Bytes | None = None,
    ) -> Any:
        return decode(
            body,
            ref.sizes,
            lent=lent,
            by_handle=ref.by_handle,
            descriptors=descriptors,
            reader=self._reader,
        )
