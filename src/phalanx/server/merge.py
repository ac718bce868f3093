"""Several asynchronous iterations as one, in the order in which their items come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import TypeVar

T = TypeVar("T")


async def merged(sources: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[tuple[int, T]]:
    """Each item with the position of its source; ends when all have ended.

    At most one item of each source waits for the reader. What a source raises is raised here, and
    the others are closed.
    """
    if len(sources) == 1:
        # Without a task an item.
        try:
            async for only in sources[0]:
                yield 0, only
        finally:
            await sources[0].aclose()
        return
    waiting: dict[asyncio.Task[tuple[T] | None], int] = {}
    for at, source in enumerate(sources):
        waiting[asyncio.create_task(_next(source))] = at
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                at = waiting.pop(task)
                item = task.result()
                if item is None:
                    continue
                waiting[asyncio.create_task(_next(sources[at]))] = at
                yield at, item[0]
    finally:
        await _close(sources, list(waiting))


async def _next(source: AsyncGenerator[T]) -> tuple[T] | None:
    async for item in source:
        return (item,)
    return None


async def _close(
    sources: Sequence[AsyncGenerator[T]], tasks: Sequence[asyncio.Task[tuple[T] | None]]
) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.exception()
    for source in sources:
        await source.aclose()
