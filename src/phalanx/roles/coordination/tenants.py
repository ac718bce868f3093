"""Who has devices by turns, as a coordinator sees it: a role, through its manager."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from phalanx.roles.contracts import Tag
from phalanx.roles.manager import InferenceManager
from phalanx.roles.outlook import Absence
from phalanx.roles.together import all_to_their_ends, raise_failures
from phalanx.wire.phases import Holding


class Tenant(Protocol):
    """A role. `activate` and `deactivate` may be repeated; each raises a `PhalanxError` where it was
    not done, and `holding` says then what is certain.
    """

    def holding(self) -> Holding:
        """What it holds on devices, at this moment."""
        ...

    async def activate(self) -> None:
        """Take memory, and serve."""
        ...

    async def deactivate(self) -> None:
        """Serve nothing, finish what runs, and give all memory back."""
        ...

    async def find_out(self, *, holds_nothing: bool) -> None:
        """Make certain what it holds where that is not; `holds_nothing` is somebody's word for it.
        Raises a `PhalanxError` where it stays uncertain.
        """
        ...

    @property
    def startup_timeout_s(self) -> float:
        """How long its start may take."""
        ...

    def absence(self) -> Absence | None:
        """Why it does not serve; None where it does."""
        ...

    async def changed(self, timeout_s: float) -> None:
        """Until what it publishes is something else, or `timeout_s` have passed."""
        ...

    def set_phase(self, phase: str | None) -> None:
        """Publish the phase of the job."""
        ...

    async def heard(self) -> None:
        """Wait until whoever sends requests knows what is published, for as long as is sensible."""
        ...


class RoleTenant:
    """The tenant that a manager's role is."""

    def __init__(self, manager: InferenceManager) -> None:
        self._manager = manager

    def holding(self) -> Holding:
        return _holding(self._manager.residency(in_turns=True))

    async def activate(self) -> None:
        await self._manager.activate()

    async def deactivate(self) -> None:
        await self._manager.deactivate()

    async def find_out(self, *, holds_nothing: bool) -> None:
        manager = self._manager
        unclear = [engine_id for engine_id, held in manager.residency().items() if held is None]
        blocked = [
            replica.engine_id
            for model in manager.registry.snapshot.content.models
            for replica in model.replicas
            if replica.blocked and replica.engine_id not in unclear
        ]
        raise_failures(
            f"role {manager.spec.role!r} is not certain yet",
            await all_to_their_ends(
                manager.unblock(engine_id, () if holds_nothing and engine_id in unclear else None)
                for engine_id in [*unclear, *blocked]
            ),
        )

    @property
    def startup_timeout_s(self) -> float:
        return self._manager.spec.deployment.startup_timeout_s

    def absence(self) -> Absence | None:
        return self._manager.absence()

    async def changed(self, timeout_s: float) -> None:
        registry = self._manager.registry
        await registry.wait(registry.snapshot.revision, timeout_s)

    def set_phase(self, phase: str | None) -> None:
        self._manager.set_phase(phase)

    async def heard(self) -> None:
        await self._manager.heard()


def _holding(residency: Mapping[str, frozenset[Tag] | None]) -> Holding:
    if any(held is None for held in residency.values()):
        return Holding.UNKNOWN
    return Holding.MEMORY if any(residency.values()) else Holding.NOTHING
