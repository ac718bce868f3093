"""The roles at this gateway: those of a job whose control process is followed, served as they come,
and those that a program serves which has the gateway in its own process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from phalanx.clock import Clock
from phalanx.gateway.gateway_url import GatewayUrl
from phalanx.gateway.http.front import Relaying
from phalanx.gateway.http.router import Router
from phalanx.gateway.roles.board import RoleBoard
from phalanx.gateway.roles.following import ControlFollower
from phalanx.gateway.roles.inference_gateway import InferenceGateway, RoleGatewaySettings
from phalanx.gateway.roles.role_set import RoleSet
from phalanx.gateway.roles.source import RoleSource
from phalanx.routing.roles.mirror import RoleMirror
from phalanx.routing.roles.snapshot import RoleSnapshot


class Roles:
    """`follow` is where the control process is, and its key. The relays of roles are put into
    `relays`.
    """

    def __init__(
        self,
        follow: tuple[GatewayUrl, str | None] | None,
        clock: Clock,
        settings: RoleGatewaySettings,
        relays: dict[str, Relaying],
    ) -> None:
        self._clock = clock
        self._settings = settings
        self._follower: ControlFollower | None = None
        unheard: Callable[[str], str] = _nothing
        if follow is not None:
            control, key = follow
            self._follower = ControlFollower(control, key, clock, self._came)
            unheard = self._follower.unheard
        self._set = RoleSet(relays, unheard)
        self._board = RoleBoard(
            self._set,
            lambda: () if self._follower is None else self._follower.events,
            lambda: None if self._follower is None else self._follower.phases,
        )

    def add_to(self, router: Router) -> None:
        router.mount(self._set)
        self._board.add_to(router)

    def serve(self, name: str, source: RoleSource, lost: Callable[[], str] = lambda: "") -> None:
        """Serve a role from now on, as `source` publishes it on this event loop; `lost` says why it
        no longer does. The source stays its owner's.
        """
        mirror = RoleMirror(source.snapshot)

        def published(snapshot: RoleSnapshot) -> None:
            mirror.put(snapshot)

        source.listen(published)
        self._add(name, mirror, lost)

    def __iter__(self) -> Iterator[InferenceGateway]:
        return iter(self._set)

    async def follow(self) -> None:
        """Until it is cancelled; returns at once where no control process is followed."""
        if self._follower is not None:
            await self._follower.run()

    @property
    def known(self) -> bool:
        """Whether there are any, or may be."""
        return self._follower is not None or bool(self._set.by_name)

    def addresses(self) -> str:
        """Where the roles are, in words, for who asks without one; empty where there are none."""
        names = [f"/{role.role}" for role in self._set]
        if not names:
            return ""
        return (
            f"the models of roles are at their role's path: {', '.join(names)} (OpenAI's clients:"
            f" {', '.join(f'{name}/v1' for name in names)})"
        )

    def close(self) -> None:
        """Answer those who wait for a change."""
        self._set.close()

    def _add(self, name: str, mirror: RoleMirror, lost: Callable[[], str]) -> None:
        self._set.add(InferenceGateway(name, mirror, self._clock, self._settings, lost=lost))

    def _came(self, name: str, mirror: RoleMirror) -> None:
        follower = self._follower
        assert follower is not None
        self._add(name, mirror, lambda: follower.lost(name))


def _nothing(role: str) -> str:
    return ""
