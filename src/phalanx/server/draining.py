"""The end of a server's work: it takes nothing new, and what runs ends or is aborted."""

from __future__ import annotations

import asyncio
import logging

from phalanx.server.lifecycle import Lifecycle, Phase
from phalanx.server.live import LiveRequests

logger = logging.getLogger(__name__)

ABORTED_GRACE_S = 5.0
"""How long aborted requests may take to send their last words."""


async def drain(
    lifecycle: Lifecycle, live: LiveRequests, timeout_s: float, hurry: asyncio.Event
) -> None:
    """Let what runs finish within `timeout_s`, or until `hurry` is set, then abort it."""
    lifecycle.move(Phase.DRAINING)
    logger.info("draining %d requests, for at most %.1f s", lifecycle.num_in_flight, timeout_s)
    idle = asyncio.create_task(lifecycle.idle(timeout_s))
    hurried = asyncio.create_task(hurry.wait())
    await asyncio.wait((idle, hurried), return_when=asyncio.FIRST_COMPLETED)
    hurried.cancel()
    idle.cancel()
    if lifecycle.num_in_flight:
        logger.warning("aborting %d requests that did not end in time", live.abort(""))
        await lifecycle.idle(ABORTED_GRACE_S)
    logger.info("drained")
