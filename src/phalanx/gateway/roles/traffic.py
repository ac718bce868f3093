"""What the requests of each engine and router of a role came to."""

from __future__ import annotations

from phalanx.clock import Clock
from phalanx.gateway.traffic import NUM_NOTES, Account, ServerTraffic
from phalanx.routing.load import Ticket
from phalanx.routing.roles.balancer import RoleServer
from phalanx.routing.roles.resolver import RouterTarget
from phalanx.routing.roles.snapshot import RoleSnapshot

ROUTER = "router"


class RoleTraffic:
    """By engine id, whatever process it is; a model's router has an id of its own. Those of engines
    that are gone are dropped.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._accounts: dict[str, Account] = {}

    def ended(self, ticket: Ticket[RoleServer], duration_s: float) -> None:
        """A request left its server."""
        server = ticket.server
        if isinstance(server, RouterTarget):
            server_id = router_id(server.model.name)
        else:
            server_id = server.engine_id
        account = self._accounts.get(server_id)
        if account is None:
            account = self._accounts[server_id] = Account()
        account.notes.append((ticket.code, ticket.started_s, duration_s, ticket.served_s))
        if len(account.notes) >= NUM_NOTES:
            account.sum_up()

    def of(self, server_id: str) -> ServerTraffic:
        account = self._accounts.get(server_id)
        if account is None:
            return ServerTraffic()
        return account.told(self._clock.monotonic_s())

    def keep(self, snapshot: RoleSnapshot) -> None:
        """Drop the accounts of all that `snapshot` has not."""
        present = {router_id(model.name) for model in snapshot.content.models}
        for model in snapshot.content.models:
            present.update(replica.engine_id for replica in model.replicas)
        for server_id in self._accounts.keys() - present:
            del self._accounts[server_id]


def router_id(model: str) -> str:
    return f"{model}/{ROUTER}"
