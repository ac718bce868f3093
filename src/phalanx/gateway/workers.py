"""Threads that read and write large observations, so that the event loop goes on meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

SMALL_BYTES = 128 * 1024
"""Work on less than this takes less time than a change of threads."""


class Workers:
    """`close` waits for work that has begun."""

    def __init__(self, num_threads: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="phalanx-gateway")

    async def run(self, work: Callable[[], T], num_bytes: int) -> T:
        """What `work` returns or raises; on a thread where it goes over many bytes."""
        if num_bytes < SMALL_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
