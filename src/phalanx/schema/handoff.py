"""What an engine that computed a prompt hands to the one that goes on: where its state is to be
read, and what was sampled. It travels as msgpack.
"""

from __future__ import annotations

import msgspec

from phalanx.schema.generate import TokenLogprobs


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


class SequenceHandoff(msgspec.Struct, frozen=True, kw_only=True):
    """One completion of the prompt so far.

    `output_ids` were sampled with `seed` and have the log-probabilities `logprobs`, where those
    were asked for. Without `kv` there is nothing to read: the completion has ended.
    """

    seed: int
    output_ids: tuple[int, ...]
    logprobs: TokenLogprobs | None = None
    kv: PublishedKV | None = None
    positions: dict[str, int] = {}


class Handoff(msgspec.Struct, frozen=True, kw_only=True):
    """A whole request: its prompt was `num_prompt_tokens` long; one entry a completion."""

    num_prompt_tokens: int
    sequences: tuple[SequenceHandoff, ...]

    def handles(self) -> tuple[Handle, ...]:
        """Everything that is held for it."""
        return tuple(
            handle for one in self.sequences if one.kv is not None for handle in one.kv.handles()
        )


def with_host(handoff: Handoff, host: str) -> Handoff:
    """`handoff`, read at `host` where its owner listens on every address of its machine."""

    def placed(stream: PublishedStream) -> PublishedStream:
        source = stream.handle.source
        if source.scheme != "tcp" or source.host not in ("0.0.0.0", "::"):
            return stream
        handle = Handle(msgspec.structs.replace(source, host=host), stream.handle.hold)
        return msgspec.structs.replace(stream, handle=handle)

    def moved(one: SequenceHandoff) -> SequenceHandoff:
        if one.kv is None:
            return one
        ranks = {
            rank: {label: placed(stream) for label, stream in streams.items()}
            for rank, streams in one.kv.ranks.items()
        }
        return msgspec.structs.replace(one, kv=msgspec.structs.replace(one.kv, ranks=ranks))

    return msgspec.structs.replace(handoff, sequences=tuple(map(moved, handoff.sequences)))
