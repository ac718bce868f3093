"""Waits in the event loop for what the engine promised in a future."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import TypeVar

from phalanx.errors import EngineUnavailableError

T = TypeVar("T")


async def engine_result(future: Future[T]) -> T:
    """The result. A future that the engine cancelled is an `EngineUnavailableError`, so that it
    is not taken for a cancelled task."""
    waiter = asyncio.wrap_future(future)
    try:
        await asyncio.wait((waiter,))
        if waiter.cancelled():
            raise EngineUnavailableError("the engine was closed before the request started")
        return waiter.result()
    finally:
        waiter.cancel()
