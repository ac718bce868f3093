"""Backends whose engines take memory only with a lease, whoever asks them to: also an engine that is
started anew after its death, or on an operator's word.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from phalanx.errors import RoleOperationRefusedError
from phalanx.roles.contracts import (
    Backends,
    EngineCallError,
    EngineControl,
    LaunchedReplica,
    Launcher,
    ReplicaLaunch,
    Tag,
)

CheckLease = Callable[[str], None]
"""Of a role. Raises `RoleOperationRefusedError` where it may not load anything now."""


def leased(backends: Backends, role: str, check: CheckLease) -> Backends:
    """`backends` of this role, which ask `check` first."""

    def connect(url: str) -> EngineControl:
        return _LeasedEngine(backends.connect(url), lambda: check(role))

    return replace(backends, launcher=_LeasedLauncher(backends.launcher, check), connect=connect)


class _LeasedLauncher:
    def __init__(self, launcher: Launcher, check: CheckLease) -> None:
        self._launcher = launcher
        self._check = check

    async def launch(self, launch: ReplicaLaunch) -> LaunchedReplica:
        self._check(launch.role)
        return await self._launcher.launch(launch)

    async def close(self) -> None:
        await self._launcher.close()


class _LeasedEngine:
    """Everything but `resume` is the engine's own."""

    def __init__(self, engine: EngineControl, check: Callable[[], None]) -> None:
        self._engine = engine
        self._check = check
        self.healthy = engine.healthy
        self.ready = engine.ready
        self.pause = engine.pause
        self.go_on = engine.go_on
        self.abort_all = engine.abort_all
        self.is_idle = engine.is_idle
        self.num_requests = engine.num_requests
        self.release = engine.release
        self.resident = engine.resident
        self.weight_version = engine.weight_version
        self.waits_for_weights = engine.waits_for_weights
        self.load_weights = engine.load_weights
        self.close = engine.close

    async def resume(self, tags: frozenset[Tag]) -> None:
        try:
            self._check()
        except RoleOperationRefusedError as error:
            raise EngineCallError(str(error), uncertain=False) from error
        await self._engine.resume(tags)
