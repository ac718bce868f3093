"""What a pool registry knows of one registered server."""

from __future__ import annotations

import enum
import hashlib
import math
from dataclasses import dataclass

from phalanx.routing.endpoint import Endpoint
from phalanx.routing.snapshot import Server, ServerState


class Probe(enum.Enum):
    """What a look at a server showed. `unreachable`: no connection, so that nothing can start."""

    HEALTHY = "healthy"
    FAILED = "failed"
    UNREACHABLE = "unreachable"


def identify(model_name: str, endpoint: Endpoint) -> str:
    """The id of this pair: the same in every gateway and after every restart."""
    # No model name holds a line feed, so that different pairs are different texts.
    text = f"{model_name}\n{endpoint.scheme}://{endpoint.authority}"
    return "s-" + hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass
class Registration:
    """`health` is what probes showed; `num_failures` of them in a row failed last.

    `lease_until_s` is None for a managed server. `probe_at_s` is None while a probe runs, and
    `probed_s` when the last one ended.
    """

    server_id: str
    model_name: str
    endpoint: Endpoint
    lease_until_s: float | None
    probe_at_s: float | None
    health: ServerState
    detail: str = ""
    probed_s: float = -math.inf
    num_failures: int = 0
    expired: bool = False
    draining: bool = False

    @property
    def managed(self) -> bool:
        return self.lease_until_s is None

    def server(self) -> Server:
        state, detail = self.health, self.detail
        if self.expired:
            state, detail = ServerState.UNHEALTHY, "it has sent no heartbeat in time"
        if self.draining:
            state, detail = ServerState.DRAINING, "it was removed"
        return Server(self.server_id, self.model_name, self.endpoint, state, self.managed, detail)
