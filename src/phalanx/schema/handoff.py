"""What an engine publishes of a request's state in its caches, and where another one reads it.

It travels as msgpack.
"""

from __future__ import annotations

import msgspec

ANY_HOST = ("0.0.0.0", "::")
"""Where to listen for connections to every address of a machine."""


class Source(msgspec.Struct, frozen=True):
    """Where the pages that an engine holds for others are read.

    `scheme` is `shm` (the same machine; `host` is the name of a socket) or `tcp` (`host` and
    `port`). Who has the `token` may read and release what is held there.
    """

    scheme: str
    host: str
    port: int
    token: str


class Handle(msgspec.Struct, frozen=True):
    """One request's held pages: at `source`, under the id `hold` (empty while nothing is held)."""

    source: Source
    hold: str = ""


class PublishedStream(msgspec.Struct, frozen=True):
    """One token sequence of a paged cache: so many tokens, in these pages of its owner."""

    length: int
    handle: Handle
    pages: tuple[int, ...]
    generation: int


class KVGeometry(msgspec.Struct, frozen=True):
    """What must be equal on both sides, since pages are copied as they are."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: str


class PublishedKV(msgspec.Struct, frozen=True):
    """A request's state in the caches of an engine's ranks: `ranks[rank][label]`."""

    world_size: int
    geometry: KVGeometry
    ranks: dict[int, dict[str, PublishedStream]]

    def merged(self, other: PublishedKV) -> PublishedKV:
        """Both: ranks and labels are added, and of a label that both have `other`'s is kept."""
        ranks = {rank: dict(streams) for rank, streams in self.ranks.items()}
        for rank, streams in other.ranks.items():
            ranks[rank] = ranks.get(rank, {}) | streams
        return PublishedKV(self.world_size, self.geometry, ranks)

    def handles(self) -> tuple[Handle, ...]:
        """Everything that is held for it, each once, in order."""
        found = (one.handle for streams in self.ranks.values() for one in streams.values())
        return tuple(dict.fromkeys(handle for handle in found if handle.hold))

    def at_host(self, host: str) -> PublishedKV:
        """This, read at `host` where its owner listens on every address of its machine."""

        def placed(stream: PublishedStream) -> PublishedStream:
            handle = stream.handle
            if handle.source.scheme != "tcp" or handle.source.host not in ANY_HOST:
                return stream
            source = msgspec.structs.replace(handle.source, host=host)
            return msgspec.structs.replace(stream, handle=Handle(source, handle.hold))

        ranks = {
            rank: {label: placed(stream) for label, stream in streams.items()}
            for rank, streams in self.ranks.items()
        }
        return PublishedKV(self.world_size, self.geometry, ranks)
