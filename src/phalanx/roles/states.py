"""The life of one generation of a replica: the six states, and the only ways from one to another."""

from __future__ import annotations

from phalanx.errors import RoleOperationRefusedError
from phalanx.routing.roles.snapshot import ReplicaState

EDGES = frozenset(
    {
        (ReplicaState.STARTING, ReplicaState.READY),
        (ReplicaState.READY, ReplicaState.DRAINING),
        (ReplicaState.DRAINING, ReplicaState.SLEEPING),
        (ReplicaState.SLEEPING, ReplicaState.ONLOADING),
        (ReplicaState.ONLOADING, ReplicaState.READY),
        # A wake that failed, after what it took is given back for certain.
        (ReplicaState.ONLOADING, ReplicaState.SLEEPING),
        (ReplicaState.STARTING, ReplicaState.DEAD),
        (ReplicaState.READY, ReplicaState.DEAD),
        (ReplicaState.DRAINING, ReplicaState.DEAD),
        (ReplicaState.SLEEPING, ReplicaState.DEAD),
        (ReplicaState.ONLOADING, ReplicaState.DEAD),
    }
)
"""Nothing leads out of `dead`: a replica that is started again is a new generation."""


class IllegalTransitionError(RoleOperationRefusedError):
    """A replica cannot go from one of these states to the other; it stays where it is."""


def check_transition(before: ReplicaState, after: ReplicaState) -> None:
    """Raises `IllegalTransitionError` for every pair that is no edge, a state to itself included."""
    if (before, after) not in EDGES:
        allowed = sorted(end.value for start, end in EDGES if start is before)
        raise IllegalTransitionError(
            f"a replica cannot go from {before.value} to {after.value};"
            f" from {before.value} it can go to {', '.join(allowed) or 'no other state'}"
        )
