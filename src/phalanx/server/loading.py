"""Loads an engine while its server already answers, and is told to stop if need be."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager

from phalanx.engine.engine import Engine
from phalanx.server.lifecycle import Lifecycle, Phase
from phalanx.server.stop import Stop

logger = logging.getLogger(__name__)


@asynccontextmanager
async def loaded_engine(
    factory: Callable[[], Engine], stop: Stop, lifecycle: Lifecycle
) -> AsyncIterator[Engine | None]:
    """The engine that `factory` makes in a thread, which is closed on the way out; None where the
    server is stopped before it is there.

    An engine that nobody takes any more is closed too. Raises what `factory` raised.
    """
    engine = await _load(factory, stop)
    if engine is None:
        lifecycle.move(Phase.DRAINING)
        logger.info("stopped while loading")
        yield None
        return
    try:
        yield engine
    finally:
        await asyncio.to_thread(engine.close)


async def _load(factory: Callable[[], Engine], stop: Stop) -> Engine | None:
    loading = asyncio.wrap_future(_in_thread(factory))
    stopped = asyncio.create_task(stop.asked.wait())
    try:
        await asyncio.wait((loading, stopped), return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopped.cancel()
        if not loading.done():
            loading.cancel()
    return None if loading.cancelled() else loading.result()


def _in_thread(load: Callable[[], Engine]) -> Future[Engine]:
    """Load in a thread that does not keep the process from ending."""
    loading: Future[Engine] = Future()

    def run() -> None:
        try:
            engine = load()
        except BaseException as error:  # noqa: BLE001 - it is raised where the future is awaited
            if loading.set_running_or_notify_cancel():
                loading.set_exception(error)
            return
        if loading.set_running_or_notify_cancel():
            loading.set_result(engine)
        else:
            engine.close()

    threading.Thread(target=run, name="phalanx-load", daemon=True).start()
    return loading
