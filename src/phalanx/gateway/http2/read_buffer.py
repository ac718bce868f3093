"""The memory that connections are read into, so that nothing of it has to be copied."""

from __future__ import annotations

import numpy as np

READ_BYTES = 1024 * 1024
"""One piece of memory: what a read takes at most, which is more than the images of one request."""
_LEAST_ROOM = READ_BYTES // 2
"""With less left of a piece the next one is begun, for a read that takes little costs as much."""


class ReadBuffer:
    """Of all connections of one event loop, which reads from one at a time: `room`, then `taken`.

    Nothing is ever written over: whoever keeps a part of what was read keeps the piece of memory
    that it lies in, of which others may keep other parts.
    """

    def __init__(self) -> None:
        self._piece = memoryview(b"")
        self._at = 0

    def room(self) -> memoryview:
        """Where the next bytes are to be put."""
        if len(self._piece) - self._at < _LEAST_ROOM:
            # Not a `bytearray`, which would be filled with zeros first.
            self._piece = np.empty(READ_BYTES, np.uint8).data
            self._at = 0
        return self._piece[self._at :]

    def taken(self, num_bytes: int) -> memoryview:
        """The first `num_bytes` of the last `room`, now that they have been put there."""
        start = self._at
        self._at += num_bytes
        return self._piece[start : self._at]
