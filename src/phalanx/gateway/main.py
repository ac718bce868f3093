"""Runs a gateway in this process until a signal ends it."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable

from phalanx.errors import MissingDependencyError
from phalanx.gateway.config import GatewayConfig
from phalanx.heap import keep_freed_memory

try:
    import uvloop

    from phalanx.gateway.gateway import Gateway
except ImportError as error:
    raise MissingDependencyError(
        f"the gateway needs {error.name}; install it with `pip install phalanx[serve]`"
    ) from error

logger = logging.getLogger(__name__)
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run_gateway(config: GatewayConfig, *, on_ready: Callable[[Gateway], None]) -> None:
    """Serve until SIGINT or SIGTERM, then let running requests end; a second signal cuts them off.

    `on_ready` is called when it listens. Raises `ConfigurationError` where it cannot.
    """
    keep_freed_memory()
    uvloop.run(_serve(config, on_ready))


async def _serve(config: GatewayConfig, on_ready: Callable[[Gateway], None]) -> None:
    for warning in config.warnings:
        logger.warning(warning)
    gateway = Gateway(config)
    await gateway.start()
    again = asyncio.Event()
    asked: list[int] = []

    def stop(number: int) -> None:
        asked.append(number)
        gateway.stop()
        if len(asked) > 1:
            again.set()

    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, stop, number)
    hurry = asyncio.create_task(_hurry(gateway, again))
    try:
        on_ready(gateway)
        await gateway.wait()
        logger.info("stopping: running requests have %g s to end", config.drain_timeout_s)
    finally:
        await gateway.close()
        hurry.cancel()
        await asyncio.gather(hurry, return_exceptions=True)
        for number in SIGNALS:
            loop.remove_signal_handler(number)


async def _hurry(gateway: Gateway, again: asyncio.Event) -> None:
    await again.wait()
    await gateway.close(drain_s=0.0)
