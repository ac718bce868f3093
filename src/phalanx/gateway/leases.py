"""Ends the leases of servers that registered themselves and have stopped saying so, on time."""

from __future__ import annotations

from phalanx.clock import Clock
from phalanx.gateway.alarm import Alarm
from phalanx.routing.pool_registry import PoolRegistry


class LeaseTimer:
    """`run` goes on until it is cancelled."""

    def __init__(self, registry: PoolRegistry, clock: Clock) -> None:
        self._registry = registry
        self._alarm = Alarm(clock)
        registry.publisher.listen(lambda _: self._alarm.wake())

    async def run(self) -> None:
        while True:
            self._registry.expire()
            await self._alarm.wait(self._registry.next_expiry_s())
