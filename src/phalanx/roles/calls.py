"""Calls of engines and routers in bounded time, repeated where repeating is safe."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from phalanx.roles.contracts import EngineCallError

T = TypeVar("T")

CALL_TIMEOUT_S = 10.0
"""For the answer to a call that has little to do."""
RETRY_S = 0.5
FIRST_POLL_S = 0.05
MAX_POLL_S = 0.5
MAX_GONE = 3
"""So many refused connections in a row mean that nobody will listen there again."""


class Deadline:
    """A moment of the running event loop's time."""

    def __init__(self, seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._at_s = self._loop.time() + seconds

    @property
    def left_s(self) -> float:
        return max(self._at_s - self._loop.time(), 0.0)

    @property
    def passed(self) -> bool:
        return self.left_s == 0.0


class PollPause:
    """Between one question and the next of what no engine tells by itself: ever longer."""

    def __init__(self) -> None:
        self._next_s = FIRST_POLL_S

    async def rest(self) -> None:
        await asyncio.sleep(self._next_s)
        self._next_s = min(1.5 * self._next_s, MAX_POLL_S)


async def attempt(ask: Callable[[], Awaitable[T]], what: str, timeout_s: float) -> T:
    """One call. Raises `EngineCallError`, an uncertain one when the time is over."""
    try:
        async with asyncio.timeout(timeout_s):
            return await ask()
    except TimeoutError:
        raise EngineCallError(f"{what}: no answer within {timeout_s:g} s", uncertain=True) from None
    except EngineCallError as error:
        raise EngineCallError(
            f"{what}: {error}",
            uncertain=error.uncertain,
            gone=error.gone,
            out_of_memory=error.out_of_memory,
            taken_over=error.taken_over,
        ) from error


async def insist(
    ask: Callable[[], Awaitable[T]],
    what: str,
    deadline: Deadline,
    call_timeout_s: float = CALL_TIMEOUT_S,
) -> T:
    """A call that does no harm when it is made twice, until it succeeds or the deadline passes.

    It is made once at least. Raises the last `EngineCallError`.
    """
    num_gone = 0
    while True:
        # A deadline that has passed leaves time for one short answer: the engine may be well.
        timeout_s = min(call_timeout_s, max(deadline.left_s, 1.0))
        try:
            return await attempt(ask, what, timeout_s)
        except EngineCallError as error:
            num_gone = num_gone + 1 if error.gone else 0
            if num_gone == MAX_GONE or error.taken_over or deadline.left_s <= RETRY_S:
                raise
        await asyncio.sleep(RETRY_S)
