"""The router of a role's model without a process."""

from __future__ import annotations

from phalanx.schema.roles import EngineGroupSpec
from phalanx.testing.role_faults import Faults


class FakeRouter:
    """`workers` are the URLs that it sends requests to."""

    def __init__(self, faults: Faults, url: str) -> None:
        self._faults = faults
        self.url = url
        self.workers: set[str] = set()
        self.is_open = True

    async def add(self, url: str, worker: EngineGroupSpec, bootstrap_port: int | None) -> None:
        await self._faults.strike("router.add", lambda: self.workers.add(url), crash=lambda: None)

    async def remove(self, url: str) -> None:
        await self._faults.strike(
            "router.remove", lambda: self.workers.discard(url), crash=lambda: None
        )

    async def close(self) -> None:
        self.is_open = False
