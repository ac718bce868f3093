"""The engines and routers of a role, as its requests see them: chosen, counted, and left out for a
moment after one was not reached.
"""

from __future__ import annotations

from phalanx.clock import Clock
from phalanx.errors import NoServerError, RoleNotReadyError
from phalanx.gateway.http.way import NOBODY
from phalanx.gateway.roles.source import RoleSource
from phalanx.gateway.roles.traffic import RoleTraffic
from phalanx.routing.load import Ticket
from phalanx.routing.roles.balancer import RoleBalancer, RoleServer
from phalanx.routing.roles.resolver import RoleSelector
from phalanx.routing.roles.snapshot import RoleModel, RoleSnapshot
from phalanx.schema.roles import RoutingPolicy

DOWN_S = 1.0
"""How long an engine that did not listen is asked for nothing, where there is another."""


class RoleServers:
    """Belongs to the gateway's event loop. Its manager learns of a dead engine by itself; meanwhile
    one that has no requests would get all of them.
    """

    def __init__(self, source: RoleSource, clock: Clock) -> None:
        self.snapshot = source.snapshot
        self._clock = clock
        self._down_until_s: dict[str, float] = {}
        self.traffic = RoleTraffic(clock)
        self.balancer = RoleBalancer(clock)
        self.balancer.load.listen(self.traffic.ended)
        self._published(source.snapshot)
        source.listen(self._published)

    def acquire(
        self, selector: RoleSelector, affinity: str | None, tried: frozenset[str] = NOBODY
    ) -> tuple[RoleModel, Ticket[RoleServer]]:
        """The model, and the request counted at its router or at one replica.

        Raises `UnknownModelError`, `RoleNotReadyError`, or `NoServerError` where all were tried.
        """
        acquire, snapshot = self.balancer.acquire, self.snapshot
        down = self._down() if self._down_until_s else NOBODY
        if down:
            try:
                return acquire(
                    snapshot, selector, direct=False, affinity=affinity, exclude=tried | down
                )
            except RoleNotReadyError:
                raise
            except NoServerError:
                pass  # all are down: then it is tried whether they still are
        return acquire(snapshot, selector, direct=False, affinity=affinity, exclude=tried)

    def unreachable(self, server: RoleServer) -> None:
        """No connection was made to it."""
        self._down_until_s[server.server_id] = self._clock.monotonic_s() + DOWN_S

    def _down(self) -> frozenset[str]:
        now_s = self._clock.monotonic_s()
        self._down_until_s = {
            server_id: until_s
            for server_id, until_s in self._down_until_s.items()
            if until_s > now_s
        }
        return frozenset(self._down_until_s)

    @property
    def by_affinity(self) -> bool:
        """Whether a request's affinity says which replica gets it."""
        return self.snapshot.content.routing.policy is RoutingPolicy.AFFINITY

    def _published(self, snapshot: RoleSnapshot) -> None:
        self.snapshot = snapshot
        self.balancer.keep(snapshot)
        self.traffic.keep(snapshot)
