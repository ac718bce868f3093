"""Loads an engine while its server already answers, and is told to stop if need be."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future

from phalanx.engine.engine import Engine


async def load_engine(factory: Callable[[], Engine], stopped: asyncio.Task[bool]) -> Engine | None:
    """The engine that `factory` makes in a thread; None where `stopped` ends first.

    An engine that nobody takes any more is closed. Raises what `factory` raised.
    """
    loading = asyncio.wrap_future(_in_thread(factory))
    await asyncio.wait((loading, stopped), return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        loading.cancel()
        return None
    return loading.result()


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
