"""Which weights computed the tokens of a completion, as a stream's deltas tell it piece by piece."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from phalanx.schema.generate import VersionSpan

HEADER = "x-weight-version"
"""The response header that names the version of the weights."""


def extended(spans: list[VersionSpan], later: Iterable[VersionSpan]) -> None:
    """Put `later` behind `spans`; neighbours of one name become one where a delta cut them."""
    for version, count in later:
        if spans and spans[-1][0] == version:
            spans[-1] = (version, spans[-1][1] + count)
        else:
            spans.append((version, count))


def after(spans: Sequence[VersionSpan], num_seen: int) -> tuple[VersionSpan, ...]:
    """The spans without their first `num_seen` tokens."""
    rest: list[VersionSpan] = []
    for version, count in spans:
        skipped = min(num_seen, count)
        num_seen -= skipped
        if count > skipped:
            rest.append((version, count - skipped))
    return tuple(rest)
