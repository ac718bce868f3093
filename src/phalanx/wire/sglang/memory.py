"""Bodies of SGLang's `/release_memory_occupation` and `/resume_memory_occupation`."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from phalanx.errors import InvalidRequestError
from phalanx.schema.control import ALL_TAGS, MemoryTag
from phalanx.wire.body import BodyDecoder

DONE = b"null"
"""The answer to both, as SGLang gives it."""


class MemoryBody(msgspec.Struct, frozen=True, kw_only=True):
    """`tags` null or empty means all of them."""

    tags: list[str] | None = None


_MEMORY = BodyDecoder(MemoryBody)


def parse_memory(body: bytes) -> frozenset[MemoryTag]:
    """The tags in the body, which may be empty."""
    return memory_tags(_MEMORY.decode(body or b"{}").tags)


def memory_tags(names: Iterable[str] | None) -> frozenset[MemoryTag]:
    """The tags of these names; all where there are none."""
    return frozenset(_tag(name) for name in names or ()) or ALL_TAGS


def _tag(name: str) -> MemoryTag:
    try:
        return MemoryTag(name)
    except ValueError:
        raise InvalidRequestError(
            f"tags: {name!r} is no part of an engine's memory; allowed: {', '.join(MemoryTag)}",
            field="tags",
        ) from None
