"""Who serves what at one moment. A snapshot never changes: a publisher replaces it by the next."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from phalanx.routing.endpoint import Endpoint, Scheme


class ServerState(enum.StrEnum):
    """`starting`: not yet probed. `ready`: it gets requests. `unhealthy`: its probes fail, or its
    lease has run out. `draining`: removed; it finishes what it has and then disappears.
    """

    STARTING = "starting"
    READY = "ready"
    UNHEALTHY = "unhealthy"
    DRAINING = "draining"


@dataclass(frozen=True)
class Server:
    """One server of one model.

    `managed`: an operator registered it, and it is probed; else it registered itself and holds a
    lease. `detail`: why it gets no requests, in words, or empty.
    """

    server_id: str
    model_name: str
    endpoint: Endpoint
    state: ServerState = ServerState.STARTING
    managed: bool = True
    detail: str = ""


@dataclass(frozen=True)
class Snapshot:
    """`servers` in the order in which they were registered.

    `epoch` names the life of the publisher. Within it `revision` grows by one with every change of
    what is published, and never otherwise.
    """

    epoch: str
    revision: int = 0
    servers: tuple[Server, ...] = ()

    @cached_property
    def by_id(self) -> Mapping[str, Server]:
        return {server.server_id: server for server in self.servers}

    @cached_property
    def ready(self) -> Mapping[tuple[str, Scheme], tuple[Server, ...]]:
        """Those that may get a request, by model and by what they speak."""
        return self._grouped(lambda server: server.state is ServerState.READY)

    @cached_property
    def serving(self) -> Mapping[tuple[str, Scheme], tuple[Server, ...]]:
        """Those that are not on their way out, by model and by what they speak."""
        return self._grouped(lambda server: server.state is not ServerState.DRAINING)

    def _grouped(
        self, wanted: Callable[[Server], bool]
    ) -> Mapping[tuple[str, Scheme], tuple[Server, ...]]:
        groups: dict[tuple[str, Scheme], tuple[Server, ...]] = {}
        for server in self.servers:
            if wanted(server):
                key = (server.model_name, server.endpoint.scheme)
                groups[key] = (*groups.get(key, ()), server)
        return groups
