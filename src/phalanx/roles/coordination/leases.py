"""Who may be resident on which device: a lease is on all devices of a tenant, and on each device one
tenant has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from phalanx.errors import RoleOperationRefusedError
from phalanx.wire.phases import Holding, LeaseView


class LeaseTable:
    """Of the tenants with these bundles. Nothing is resident without a lease."""

    def __init__(self, bundles: Mapping[str, Iterable[str]]) -> None:
        self._bundles = {tenant: tuple(its) for tenant, its in bundles.items()}
        self._holders: dict[str, None] = {}
        self._by_bundle: dict[str, str] = {}

    @property
    def holders(self) -> tuple[str, ...]:
        return tuple(self._holders)

    def holds(self, tenant: str) -> bool:
        return tenant in self._holders

    def bundles(self, tenant: str) -> tuple[str, ...]:
        return self._bundles[tenant]

    def take(self, tenants: Iterable[str]) -> None:
        """For all of them or for none. Raises `RoleOperationRefusedError` where one is somebody
        else's.
        """
        tenants, wanted = tuple(tenants), dict[str, str]()
        for tenant in tenants:
            for bundle in self._bundles[tenant]:
                holder = self._by_bundle.get(bundle, wanted.get(bundle, tenant))
                if holder != tenant:
                    raise RoleOperationRefusedError(
                        f"{tenant} cannot have device {bundle}, which {holder} holds"
                    )
                wanted[bundle] = tenant
        self._by_bundle.update(wanted)
        self._holders.update(dict.fromkeys(tenants))

    def give_up(self, tenant: str) -> None:
        """Only of one that holds nothing for certain. No-op without a lease."""
        self._holders.pop(tenant, None)
        for bundle in self._bundles[tenant]:
            if self._by_bundle.get(bundle) == tenant:
                del self._by_bundle[bundle]

    def check(self, tenant: str) -> None:
        """Raises `RoleOperationRefusedError` where it may not load anything."""
        if not self.holds(tenant):
            raise RoleOperationRefusedError(
                f"{tenant} has no lease on its devices in this phase, so it loads nothing; its"
                " phase gives it one: `phalanx phase enter`"
            )

    def views(self, holding: Callable[[str], Holding]) -> tuple[LeaseView, ...]:
        """Every bundle, with who has it."""
        known = {tenant: holding(tenant) for tenant in self._holders}
        views = dict[str, LeaseView]()
        for its in self._bundles.values():
            for bundle in its:
                holder = self._by_bundle.get(bundle)
                held = Holding.NOTHING if holder is None else known[holder]
                views.setdefault(bundle, LeaseView(bundle, holder, held))
        return tuple(views.values())
