"""Takes tenants out of the devices that they share, and puts others in.

A lease is given up when its tenant holds nothing for certain, and at no other time; nothing is loaded
without one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from phalanx.errors import PhalanxError, RoleOperationFailedError
from phalanx.roles.coordination.leases import LeaseTable
from phalanx.roles.coordination.tenants import Tenant
from phalanx.roles.events import EventKind
from phalanx.roles.together import all_to_their_ends
from phalanx.wire.phases import Holding

Tell = Callable[[str, EventKind, str], None]
"""Of a tenant (or nobody): what happened, in words."""


class UncertainError(RoleOperationFailedError):
    """Somebody may hold memory, and keeps the lease."""


class Moves:
    """`roles` are those that take turns. The trainer moves by itself."""

    def __init__(self, roles: Mapping[str, Tenant], leases: LeaseTable, tell: Tell) -> None:
        self._roles = roles
        self._leases = leases
        self._tell = tell

    def uncertain(self) -> tuple[str, ...]:
        """The roles of which nobody knows what they hold."""
        return tuple(
            name for name, tenant in self._roles.items() if tenant.holding() is Holding.UNKNOWN
        )

    async def clear(self, staying: Iterable[str] = ()) -> None:
        """Have every role but these hold nothing, all at once, and give its lease up.

        Raises `UncertainError` where that is not certain of one; the others have done it all the
        same.
        """
        stays = set(staying)
        # Of one that slept and died meanwhile something may be left.
        while leaving := self._leaving(stays):
            await self._empty(leaving)

    def _leaving(self, stays: Collection[str]) -> list[str]:
        return [
            name
            for name, tenant in self._roles.items()
            if name not in stays
            and (self._leases.holds(name) or tenant.holding() is not Holding.NOTHING)
        ]

    async def _empty(self, leaving: Iterable[str]) -> None:
        problems: dict[str, str] = {}

        async def empty(name: str) -> None:
            try:
                await self._roles[name].deactivate()
            except PhalanxError as error:
                problems[name] = str(error)
            if not self.give_up(name):
                problems.setdefault(name, "it said that it holds nothing, and does")
            elif problem := problems.pop(name, None):
                self._tell(name, EventKind.FAILED, f"{problem}; it holds nothing all the same")

        await all_to_their_ends(empty(name) for name in leaving)
        if problems:
            raise UncertainError("; ".join(self._kept(name, problems[name]) for name in problems))

    async def fill(self, names: Iterable[str]) -> None:
        """Have these roles, which have their leases, serve: all at once, each to its end.

        Raises `RoleOperationFailedError` where one does not.
        """
        failures = await all_to_their_ends(self._roles[name].activate() for name in names)
        if failures:
            text = "; ".join(str(failure) for failure in failures)
            raise RoleOperationFailedError(f"the phase has not begun: {text}") from failures[0]

    async def find_out(self, names: Iterable[str], vouched: Collection[str]) -> None:
        """Make certain what these roles hold; of the `vouched`, somebody's word is taken for it that
        they hold nothing. What stays uncertain is told as an event.
        """

        async def ask(name: str) -> None:
            try:
                await self._roles[name].find_out(holds_nothing=name in vouched)
            except PhalanxError as error:
                self._tell(name, EventKind.FAILED, str(error))

        await all_to_their_ends(ask(name) for name in names)

    def take(self, names: Iterable[str]) -> None:
        """The leases of these, all or none. Raises `RoleOperationFailedError`."""
        names = tuple(names)
        for name, tenant in self._roles.items():
            if name not in names and tenant.holding() is not Holding.NOTHING:
                raise UncertainError(self._kept(name, "it holds memory without a lease"))
        new = [name for name in names if not self._leases.holds(name)]
        self._leases.take(names)
        for name in new:
            devices = ", ".join(self._leases.bundles(name))
            self._tell(name, EventKind.LEASE, f"has the lease of {devices}")

    def give_up(self, name: str, why: str = "") -> bool:
        """Its lease, where it holds nothing for certain or `why` somebody says so; whether that was
        done. No-op without a lease.
        """
        tenant = self._roles.get(name)
        if not why and tenant is not None and tenant.holding() is not Holding.NOTHING:
            return False
        if self._leases.holds(name):
            self._leases.give_up(name)
            devices = ", ".join(self._leases.bundles(name))
            self._tell(name, EventKind.LEASE, f"gave up {devices}" + (f": {why}" if why else ""))
        return True

    def _kept(self, name: str, problem: str) -> str:
        devices = ", ".join(self._leases.bundles(name))
        holding = self._roles[name].holding()
        perhaps = "perhaps holds" if holding is Holding.UNKNOWN else "holds"
        return f"role {name!r} {perhaps} memory on {devices} ({problem})"
