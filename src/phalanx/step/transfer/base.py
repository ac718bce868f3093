"""What a cache asks of a transfer. The receiver pulls; whoever holds pages only waits for it.

Content is a row of equal chunks, one for the keys and one for the values of each layer.
"""

from __future__ import annotations

import enum
from concurrent.futures import Future
from typing import Protocol

import msgspec

from phalanx.schema.handoff import Handle, Source


class PageRead(msgspec.Struct, frozen=True):
    """Tokens `start` to `stop` of one stream of a hold, as it was at `generation`."""

    label: str
    generation: int
    start: int
    stop: int


class Content(Protocol):
    """What is sent: chunks of one size, gathered when asked for."""

    @property
    def num_chunks(self) -> int: ...

    @property
    def chunk_bytes(self) -> int: ...

    def chunk(self, index: int) -> memoryview: ...


class Sink(Protocol):
    """Where chunks go at the receiver; called on a thread of the transfer."""

    @property
    def num_chunks(self) -> int: ...

    @property
    def chunk_bytes(self) -> int: ...

    def write(self, index: int, chunk: memoryview) -> None: ...

    def finish(self) -> None:
        """All chunks were written: return when they are on the device."""
        ...


class HeldState(Protocol):
    """One request's pages, kept for others."""

    def open(self, read: PageRead) -> Content:
        """Raises `RequestFailedError` for what is not there."""
        ...

    def free(self) -> None:
        """Give the pages back; called once, from any thread."""
        ...


class Reason(enum.StrEnum):
    """Why a hold ended."""

    TAKEN = "taken"
    DROPPED = "dropped"
    EXPIRED = "expired"
    CLOSED = "closed"


class Ending(msgspec.Struct, frozen=True):
    """How a hold ended; `message` says more where it was not taken."""

    reason: Reason
    message: str = ""


TAKEN = Ending(Reason.TAKEN)


class Transfer(Protocol):
    """One engine's end: it holds pages for others, and reads what they hold."""

    @property
    def source(self) -> Source:
        """Where others read what this one holds."""
        ...

    def hold(self, state: HeldState) -> Handle:
        """Keep `state` until a reader has it, somebody drops it, or its time is over."""
        ...

    def take_back(self, handle: Handle) -> HeldState | None:
        """End a hold of this engine's own without freeing it; None for another engine's.

        Raises `RequestFailedError` where the hold has ended or is being read.
        """
        ...

    def read(self, handle: Handle, read: PageRead, sink: Sink) -> Future[None]:
        """Begin to read. The future fails with `RequestFailedError`, in bounded time."""
        ...

    def release(self, handle: Handle, ending: Ending = TAKEN) -> None:
        """Tell the holder that nobody needs this any more; does not wait and does not raise."""
        ...

    def close(self) -> None:
        """End every hold and wait for what is being read."""
        ...
