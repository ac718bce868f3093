"""The roles that a gateway serves, by the first part of their paths; more may come while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from phalanx.gateway.http.front import Relaying
from phalanx.gateway.http.refusal import Refusal
from phalanx.gateway.http.router import NoRoute, Route
from phalanx.gateway.roles.inference_gateway import ONE_MODEL, InferenceGateway
from phalanx.schema.roles import RESERVED_ROLES

PATHS = frozenset(
    {"engines", "health", "v1/models", "generate", "chat/completions", "v1/chat/completions"}
)
RETRY_AFTER_S = 1


class RoleSet:
    """`unheard` says why a role of that name may yet come, or is empty."""

    def __init__(
        self, relays: dict[str, Relaying], unheard: Callable[[str], str] = lambda name: ""
    ) -> None:
        """The relays of each role are put into `relays`, which the HTTP server reads."""
        self._relays = relays
        self._unheard = unheard
        self._roles: dict[str, InferenceGateway] = {}

    def add(self, role: InferenceGateway) -> None:
        """Serve it from now on."""
        self._relays.update(role.relays)
        self._roles[role.role] = role

    @property
    def by_name(self) -> Mapping[str, InferenceGateway]:
        return self._roles

    def __iter__(self) -> Iterator[InferenceGateway]:
        return iter(self._roles.values())

    def find(self, method: str, path: str) -> Route | None:
        """The route of a path below a role's name."""
        name, _, rest = path[1:].partition("/")
        role = self._roles.get(name)
        if role is not None:
            return role.find(method, rest)
        if not (rest in PATHS or rest.startswith(ONE_MODEL)) or name in RESERVED_ROLES:
            return None
        why = self._unheard(name)
        if not why:
            return None
        return NoRoute(now=Refusal(503, "unavailable", why, retry_after_s=RETRY_AFTER_S))

    def close(self) -> None:
        """Answer those who wait for a change."""
        for role in self:
            role.close()
