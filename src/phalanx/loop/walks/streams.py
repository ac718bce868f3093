"""The streams of one request between its partitions."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from phalanx.loop.walks.program import WalkProgram
from phalanx.loop.walks.routes import Input
from phalanx.loop.walks.stream_buffer import Chunk, StreamBuffer


class Streams:
    """A buffer at every input that takes chunks. An input without a stream is always ready."""

    def __init__(self, program: WalkProgram) -> None:
        self._buffers: dict[Input, StreamBuffer[Tensor]] = {
            key: StreamBuffer(stream.policy) for key, stream in program.streams.items()
        }
        self._num_sent = 0

    def send(self, key: Input, items: Iterable[Tensor]) -> None:
        """Items for an input, behind those before them."""
        buffer = self._buffers[key]
        for item in items:
            self._num_sent += 1
            buffer.register(self._num_sent)
            buffer.put(self._num_sent, item)

    def finish(self, keys: Iterable[Input]) -> None:
        """Nothing will be sent to these any more."""
        for key in keys:
            self._buffers[key].finish()

    def ready(self, key: Input) -> bool:
        return self._buffers[key].ready

    def closed(self, key: Input) -> bool:
        """Whether the final chunk was taken."""
        return self._buffers[key].closed

    def take(self, key: Input) -> Chunk[Tensor]:
        return self._buffers[key].take()
