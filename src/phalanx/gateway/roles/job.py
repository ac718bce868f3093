"""The roles of a job at this gateway: what its control process tells is served as it comes."""

from __future__ import annotations

from phalanx.clock import Clock
from phalanx.gateway.gateway_url import GatewayUrl
from phalanx.gateway.http.front import Relaying
from phalanx.gateway.http.router import Router
from phalanx.gateway.roles.board import RoleBoard
from phalanx.gateway.roles.following import ControlFollower
from phalanx.gateway.roles.inference_gateway import InferenceGateway, RoleGatewaySettings
from phalanx.gateway.roles.role_set import RoleSet
from phalanx.routing.roles.mirror import RoleMirror


class JobRoles:
    """`run` follows `control` until it is cancelled. The relays of its roles are put into `relays`."""

    def __init__(
        self,
        control: GatewayUrl,
        key: str | None,
        clock: Clock,
        settings: RoleGatewaySettings,
        relays: dict[str, Relaying],
    ) -> None:
        self._clock = clock
        self._settings = settings
        self._follower = ControlFollower(control, key, clock, self._came)
        self.roles = RoleSet(relays, self._follower.unheard)

    def add_to(self, router: Router) -> None:
        router.mount(self.roles)
        RoleBoard(self.roles, lambda: self._follower.events).add_to(router)

    async def run(self) -> None:
        await self._follower.run()

    def close(self) -> None:
        """Answer those who wait for a change."""
        self.roles.close()

    def _came(self, name: str, mirror: RoleMirror) -> None:
        lost = self._follower.lost
        self.roles.add(
            InferenceGateway(name, mirror, self._clock, self._settings, lost=lambda: lost(name))
        )
