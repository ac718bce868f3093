"""Probes the servers of a pool, each at its own times, all of them at once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from functools import partial

from phalanx.clock import Clock
from phalanx.gateway.alarm import Alarm
from phalanx.gateway.health_check import Finding, HealthCheck
from phalanx.routing.endpoint import Scheme
from phalanx.routing.load import Ticket
from phalanx.routing.pool_registry import PoolRegistry
from phalanx.routing.registration import Probe
from phalanx.routing.snapshot import Server, Snapshot

logger = logging.getLogger(__name__)
MAX_CONCURRENT = 64
LOST_CODES = frozenset({"UNAVAILABLE", "DEADLINE_EXCEEDED", "502", "504"})
"""What a request comes to whose server may be gone."""


class Prober:
    """`run` goes on until it is cancelled. The registry says who is due, and hears what was found."""

    def __init__(
        self, registry: PoolRegistry, clock: Clock, checks: Mapping[Scheme, HealthCheck]
    ) -> None:
        self._registry = registry
        self._checks = checks
        self._alarm = Alarm(clock)
        self._places = asyncio.Semaphore(MAX_CONCURRENT)
        self._probes: set[asyncio.Task[None]] = set()
        self._shown: Snapshot = registry.publisher.snapshot
        registry.publisher.listen(lambda _: self._alarm.wake())
        registry.load.listen(self._left)

    async def run(self) -> None:
        try:
            while True:
                for server in self._registry.due():
                    probe = asyncio.create_task(self._probe(server))
                    self._probes.add(probe)
                    probe.add_done_callback(partial(self._ended, server))
                await self._forget_gone()
                await self._alarm.wait(self._registry.next_probe_s())
        finally:
            probes = tuple(self._probes)
            for probe in probes:
                probe.cancel()
            await asyncio.gather(*probes, return_exceptions=True)
            for check in self._checks.values():
                await check.close()

    def _left(self, ticket: Ticket, duration_s: float) -> None:
        if ticket.code in LOST_CODES:
            self._registry.suspect(ticket.server.server_id)
            self._alarm.wake()

    def _ended(self, server: Server, probe: asyncio.Task[None]) -> None:
        self._probes.discard(probe)
        error = None if probe.cancelled() else probe.exception()
        if error is not None:
            # A fault of ours; but one server's probe must not end those of the others.
            logger.error("the probe of server %s failed", server.endpoint, exc_info=error)
            words = f"it could not be probed: {error}"
            self._registry.observe(server.server_id, Probe.FAILED, words)
            self._alarm.wake()

    async def _probe(self, server: Server) -> None:
        timeout_s = self._registry.policy.probe_timeout_s
        async with self._places:
            finding: Finding
            try:
                async with asyncio.timeout(timeout_s):
                    finding = await self._checks[server.endpoint.scheme].check(server)
            except TimeoutError:
                finding = Probe.FAILED, f"no answer within {timeout_s:g} s"
        before = self._registry.publisher.snapshot.by_id.get(server.server_id)
        self._registry.observe(server.server_id, *finding)
        after = self._registry.publisher.snapshot.by_id.get(server.server_id)
        if before is not None and after is not None and before.state is not after.state:
            logger.info(
                "server %s of %s is %s%s",
                server.endpoint,
                server.model_name,
                after.state,
                f": {after.detail}" if after.detail else "",
            )
        self._alarm.wake()

    async def _forget_gone(self) -> None:
        before, self._shown = self._shown, self._registry.publisher.snapshot
        if before is self._shown:
            return
        for server in before.servers:
            if server.server_id not in self._shown.by_id:
                await self._checks[server.endpoint.scheme].forget(server.server_id)
