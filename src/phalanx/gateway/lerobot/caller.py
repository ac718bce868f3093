"""Who a call of LeRobot's service comes from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from phalanx.gateway.grpc.service import Context

SESSION_ID = "x-session-id"


@dataclass(frozen=True)
class Caller:
    """`peer` is the connection, new after a reconnect. `address` is what the robot was told to
    connect to: the gateway's port, with the host name that it typed where that is known. `fps` is
    the rate of that port's robots, where it has one of its own.
    """

    peer: str
    address: str
    session_id: str | None = None
    fps: float | None = field(default=None, compare=False)

    @property
    def host(self) -> str:
        """The machine that the connection comes from."""
        return self.peer.rpartition(":")[0]


def caller_of(context: Context, address: str) -> Caller:
    """The caller of a running call that came in at `address`."""
    return Caller(context.peer(), address, session_id_of(context.invocation_metadata() or ()))


def session_id_of(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    """The session that a call names; LeRobot's own client names none."""
    for key, value in metadata:
        if key == SESSION_ID and isinstance(value, str) and value:
            return value[:200]
    return None
