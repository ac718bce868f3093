"""Where tokens of streams lie in the pages, as arrays on the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from phalanx.step.resources.cache_stream import CacheStream


def slots_of(
    spans: Sequence[int], streams: Sequence[CacheStream], page_size: int
) -> NDArray[np.int64]:
    """The flat cache positions that the streams' next tokens are written to, stream by stream."""
    slots = np.empty(sum(spans), dtype=np.int64)
    at = 0
    for span, stream in zip(spans, streams, strict=True):
        if span == 1:
            page, offset = divmod(stream.stored_len, page_size)
            slots[at] = int(stream.pages[page]) * page_size + offset
        elif span:
            tokens = np.arange(stream.stored_len, stream.stored_len + span, dtype=np.int64)
            slots[at : at + span] = stream.pages[tokens // page_size] * np.int64(page_size)
            slots[at : at + span] += tokens % page_size
        at += span
    return slots


def table_of(
    lens: Sequence[int], streams: Sequence[CacheStream], page_size: int, width: int | None = None
) -> NDArray[np.int32]:
    """The pages of each stream's first tokens, int32 [streams, `width`], padded with the sink; as
    wide as the longest where `width` is None.
    """
    counts = [-(-length // page_size) for length in lens]
    if width is None:
        width = max(counts, default=1) or 1
    table = np.zeros((len(streams), width), dtype=np.int32)
    for row, (stream, count) in enumerate(zip(streams, counts, strict=True)):
        table[row, :count] = stream.pages[:count]
    return table
