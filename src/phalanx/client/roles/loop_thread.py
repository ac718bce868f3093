"""An event loop in a thread of its own, for callers that have none."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import TypeVar

from phalanx.errors import ConfigurationError, EngineUnavailableError

T = TypeVar("T")


class LoopThread:
    """Any number of threads may run coroutines there, at the same time."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._closed = False
        ready: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        # A program that forgets to close it can end all the same.
        self._thread = threading.Thread(
            target=lambda: asyncio.run(_until_stopped(ready)), name=name, daemon=True
        )
        self._thread.start()
        self._loop, self._stop = ready.result()

    def run(self, work: Coroutine[None, None, T]) -> T:
        """The result of `work`, which is cancelled where the caller is interrupted.

        Raises `EngineUnavailableError` after `close`, and `ConfigurationError` inside a running
        event loop, which this would block.
        """
        try:
            future = self._begun(work)
        except BaseException:
            work.close()
            raise
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self, last: Callable[[], Coroutine[None, None, None]] | None = None) -> None:
        """Run `last`, let everything that runs end, and stop. Again changes nothing."""
        refuse_inside_a_loop(self._name)
        with self._lock:
            is_first, self._closed = not self._closed, True
        if is_first:
            try:
                if last is not None:
                    asyncio.run_coroutine_threadsafe(last(), self._loop).result()
            finally:
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _begun(self, work: Coroutine[None, None, T]) -> Future[T]:
        refuse_inside_a_loop(self._name)
        with self._lock:
            if self._closed:
                raise EngineUnavailableError("the client is closed; make a new one")
            return asyncio.run_coroutine_threadsafe(work, self._loop)


def refuse_inside_a_loop(name: str) -> None:
    """Raise `ConfigurationError` in a thread that runs an event loop; `name` is the client's."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise ConfigurationError(f"{name} would block the running event loop; use Async{name} there")


async def _until_stopped(
    ready: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]],
) -> None:
    stop = asyncio.Event()
    ready.set_result((asyncio.get_running_loop(), stop))
    await stop.wait()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.gather(*others, return_exceptions=True)
