"""The engines and routers of a role, as its requests see them: chosen, counted, and left out for a
moment after one was not reached.
"""

from __future__ import annotations

from phalanx.clock import Clock
from phalanx.errors import NoServerError
from phalanx.gateway.http.way import NOBODY
from phalanx.gateway.roles.source import RoleSource
from phalanx.gateway.roles.traffic import RoleTraffic
from phalanx.routing.load import Ticket
from phalanx.routing.roles.balancer import RoleBalancer, RoleServer
from phalanx.routing.roles.resolver import RoleSelector, RoleTarget, resolve
from phalanx.routing.roles.snapshot import RoleModel, RoleSnapshot
from phalanx.schema.roles import RoutingPolicy

DOWN_S = 1.0
"""How long an engine that did not listen is asked for nothing, where there is another."""


class RoleServers:
    """Belongs to the gateway's event loop. Its manager learns of a dead engine by itself; meanwhile
    one that has no requests would get all of them.

    `by_affinity`: whether a request's affinity says which replica gets it.
    """

    def __init__(self, source: RoleSource, clock: Clock) -> None:
        self._clock = clock
        self._down_until_s: dict[str, float] = {}
        self.traffic = RoleTraffic(clock)
        self.balancer = RoleBalancer(clock)
        self.balancer.load.listen(self.traffic.ended)
        self._acquire = self.balancer.load.acquire
        self._published(source.snapshot)
        source.listen(self._published)

    def acquire(
        self, selector: RoleSelector, affinity: str | None, tried: frozenset[str] = NOBODY
    ) -> tuple[RoleModel, Ticket[RoleServer]]:
        """The model, and the request counted at its router or at one replica.

        Raises `UnknownModelError`, `RoleNotReadyError`, or `NoServerError` where all were tried.
        """
        target = self.target(selector)
        return target.model, self.choose(target, affinity if self.by_affinity else None, tried)

    def target(self, selector: RoleSelector) -> RoleTarget:
        """Where a request may go, as long as `snapshot` is the same. Raises as `resolve` does."""
        return resolve(self.snapshot, selector, direct=False)

    def choose(
        self, target: RoleTarget, affinity: str | None, tried: frozenset[str]
    ) -> Ticket[RoleServer]:
        """The request counted at one server of `target`. `affinity` is its key, None where not
        `by_affinity`. Raises `NoServerError` where all were tried.
        """
        if affinity is None and not self._down_until_s:
            return self._acquire(target.candidates, tried)
        down = self._down()
        if down:
            try:
                return self.balancer.choose(target, affinity, tried | down)
            except NoServerError:
                pass  # all are down: then it is tried whether they still are
        return self.balancer.choose(target, affinity, tried)

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

    def _published(self, snapshot: RoleSnapshot) -> None:
        self.snapshot = snapshot
        self.by_affinity = snapshot.content.routing.policy is RoutingPolicy.AFFINITY
        self.balancer.keep(snapshot)
        self.traffic.keep(snapshot)
