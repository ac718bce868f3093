"""Content and sinks without a cache."""

from __future__ import annotations

from phalanx.errors import RequestFailedError
from phalanx.step.transfer.base import PageRead

READ = PageRead("main", 1, 0, 4)


class Bytes:
    """Chunks of bytes: what is sent, or what has come."""

    def __init__(self, *chunks: bytes, chunk_bytes: int | None = None, count: int = 0) -> None:
        self.chunks = list(chunks) or [b""] * count
        self._chunk_bytes = len(chunks[0]) if chunk_bytes is None else chunk_bytes
        self.finished = False

    @property
    def num_chunks(self) -> int:
        return len(self.chunks)

    @property
    def chunk_bytes(self) -> int:
        return self._chunk_bytes

    def chunk(self, index: int) -> memoryview:
        return memoryview(self.chunks[index])

    def write(self, index: int, chunk: memoryview) -> None:
        self.chunks[index] = bytes(chunk)

    def finish(self) -> None:
        self.finished = True


class Held:
    """State that counts how often it was freed."""

    def __init__(self, content: Bytes | None = None) -> None:
        self.content = content or Bytes(b"keys", b"vals")
        self.num_freed = 0

    def open(self, read: PageRead) -> Bytes:
        if read.label != "main":
            raise RequestFailedError(f"label {read.label!r} is not held as it was published")
        return self.content

    def free(self) -> None:
        self.num_freed += 1
