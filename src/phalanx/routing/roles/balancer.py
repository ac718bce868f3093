"""Where one request of a role goes: resolved, chosen and counted in one step.

The gateway and direct clients choose here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable

from phalanx.clock import Clock
from phalanx.errors import NoServerError
from phalanx.routing.load import InFlight, Ticket
from phalanx.routing.resolver import RETRY_AFTER_S
from phalanx.routing.roles.affinity import Affinity
from phalanx.routing.roles.resolver import RoleSelector, RoleTarget, RouterTarget, resolve
from phalanx.routing.roles.snapshot import RoleModel, RoleReplica, RoleSnapshot
from phalanx.schema.roles import RoutingPolicy

_MAX_RESOLVED = 1024
RoleServer = RoleReplica | RouterTarget
"""What a request is sent to; both have `server_id` and `base_url`."""


class RoleBalancer:
    """Counts the requests of one role. Belongs to one event loop.

    `first_turn` puts replicas that were never chosen in another order than they are published in.
    """

    def __init__(self, clock: Clock, first_turn: Callable[[], int] = lambda: 0) -> None:
        self.load: InFlight[RoleServer] = InFlight(clock, self._idle, first_turn)
        self._affinity = Affinity()
        self._present: frozenset[str] = frozenset()
        self._resolved: tuple[RoleSnapshot | None, dict[tuple[RoleSelector, bool], RoleTarget]]
        self._resolved = None, {}

    def acquire(
        self,
        snapshot: RoleSnapshot,
        selector: RoleSelector,
        *,
        direct: bool,
        affinity: str | None = None,
        exclude: frozenset[str] = frozenset(),
    ) -> tuple[RoleModel, Ticket[RoleServer]]:
        """The model that is asked for, and the request counted at its router or at one replica.

        `affinity` is the key of policy `affinity`; without one the least busy replica is chosen, as
        by the other policy. `exclude` are `server_id`s that were tried. Raises as `resolve` does, and
        `NoServerError` where all were tried. The caller releases the ticket whatever happens.
        """
        target = self._target(snapshot, selector, direct=direct)
        if affinity is not None and snapshot.content.routing.policy is not RoutingPolicy.AFFINITY:
            affinity = None
        return target.model, self.choose(target, affinity, exclude)

    def choose(
        self, target: RoleTarget, affinity: str | None, exclude: frozenset[str]
    ) -> Ticket[RoleServer]:
        """As `acquire`, for who knows what its selector and the policy come to."""
        choices: tuple[RoleServer, ...] = target.candidates
        if affinity is not None and not isinstance(target, RouterTarget):
            preferred = self._affinity.prefer(affinity, target.candidates, exclude)
            if preferred is None:
                raise NoServerError(
                    "every replica that could take this request has been tried; send it again later",
                    retry_after_s=RETRY_AFTER_S,
                )
            choices = (preferred,)
        return self.load.acquire(choices, exclude)

    def keep(self, snapshot: RoleSnapshot) -> None:
        """Drop the counts of replicas that `snapshot` has no longer, once their requests have left."""
        gone = self._present
        self._present = frozenset(
            replica.server_id for model in snapshot.content.models for replica in model.replicas
        )
        for server_id in gone - self._present:
            if self.load.count(server_id) == 0:
                self.load.forget(server_id)

    def _target(
        self, snapshot: RoleSnapshot, selector: RoleSelector, *, direct: bool
    ) -> RoleTarget:
        """As `resolve`, which is asked the same of one snapshot again and again."""
        resolved_of, resolved = self._resolved
        if resolved_of is not snapshot:
            resolved = {}
            self._resolved = snapshot, resolved
        key = selector, direct
        target = resolved.get(key)
        if target is None:
            target = resolve(snapshot, selector, direct=direct)
            if len(resolved) < _MAX_RESOLVED:  # there are as many keys as route keys
                resolved[key] = target
        return target

    def _idle(self, server_id: str) -> None:
        if server_id not in self._present:
            self.load.forget(server_id)
