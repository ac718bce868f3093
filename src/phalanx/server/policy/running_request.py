"""One request that a policy server works on: what is done for it, and how it is ended early."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from phalanx.server.policy.failures import RequestAbortedError


@dataclass(frozen=True, eq=False)
class RunningRequest:
    """One request; `aborted` is resolved when the server ends it.

    `work` is what threads and the engine do for it.
    """

    rid: str
    aborted: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    work: list[Future[Any]] = field(default_factory=list)

    def abort(self) -> None:
        if not self.aborted.done():
            self.aborted.set_result(None)

    async def over(self) -> None:
        """Wait until nothing is done for it any more."""
        while pending := [future for future in self.work if not future.done()]:
            for future in pending:
                await _settled(future)

    async def until_done(self, future: Future[Any], cancel: Callable[[], object]) -> None:
        """Wait for `future`; calls `cancel` where the caller leaves or the request is aborted.

        Raises `RequestAbortedError` then.
        """
        settled = asyncio.create_task(_settled(future))
        try:
            await asyncio.wait((settled, self.aborted), return_when=asyncio.FIRST_COMPLETED)
            if not settled.done():
                raise RequestAbortedError("the server ended the request before it was complete")
        except (asyncio.CancelledError, RequestAbortedError):
            cancel()
            raise
        finally:
            settled.cancel()


async def _settled(future: Future[Any]) -> None:
    """Wait until `future` is done, however it ends; leaves it alone where the caller leaves."""
    done = asyncio.Event()
    loop = asyncio.get_running_loop()

    def tell(_: Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(done.set)

    future.add_done_callback(tell)
    await done.wait()
