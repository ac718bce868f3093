"""Work on the engine that is done to its end, and noted, though whoever asked for it has left.

A trainer that gave up on an answer would else leave a server that does not know what its engine did.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Undertakings:
    """Keeps what is under way; what goes wrong with nobody there to hear of it is logged."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    async def done(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`. Where the caller is cancelled, the work goes on without it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_log)
            raise


def _log(task: asyncio.Task[Any]) -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None:
        logger.warning("an operation failed whose caller had left: %s", error)
