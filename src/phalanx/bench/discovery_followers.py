"""A role's gateway and a crowd that follows it: the gateway's own HTTP code, over transports that are
in memory and know what they were written.
"""

from __future__ import annotations

import asyncio

from phalanx.clock import SystemClock
from phalanx.gateway.http.connection import ClientConnection
from phalanx.gateway.http.front import Front
from phalanx.gateway.http.keys import Keys
from phalanx.gateway.http.limits import HttpLimits
from phalanx.gateway.http.request_ids import RequestIds
from phalanx.gateway.http.router import Router
from phalanx.gateway.http.statistics import HttpStatistics
from phalanx.gateway.http.whole_message import KnownHeads
from phalanx.gateway.roles.inference_gateway import InferenceGateway
from phalanx.gateway.roles.role_set import RoleSet
from phalanx.routing.roles.registry import RoleRegistry

ROLE = "rollout"
WAIT_S = 60.0


class Crowd:
    """`num_followers` connections to one gateway. Belongs to one event loop."""

    def __init__(self, registry: RoleRegistry, num_followers: int, *, compressed: bool) -> None:
        self.registry = registry
        self.num_bytes = 0
        self.last_body = b""
        self._coding = "gzip" if compressed else "identity"
        self._unanswered = 0
        self._all_answered = asyncio.Event()
        front = _front(registry)
        server = _Server()
        self._followers = [_Follower(self, front, server) for _ in range(num_followers)]

    def ask(self) -> None:
        """Every follower asks for what comes after the published snapshot."""
        snapshot = self.registry.snapshot
        request = (
            f"GET /{ROLE}/engines?after={snapshot.revision}&epoch={snapshot.epoch}"
            f"&wait_s={WAIT_S:g} HTTP/1.1\r\nhost: gateway\r\naccept-encoding: {self._coding}\r\n\r\n"
        ).encode()
        self._unanswered = len(self._followers)
        self._all_answered.clear()
        for follower in self._followers:
            follower.connection.data_received(request)

    async def asked(self) -> None:
        """Until every follower waits at the registry."""
        while self.registry.num_waiting < len(self._followers):  # noqa: ASYNC110
            await asyncio.sleep(0)

    async def answered(self) -> None:
        """Until every follower has a whole answer."""
        await self._all_answered.wait()

    def leave(self) -> None:
        for follower in self._followers:
            follower.connection.connection_lost(None)

    def took(self, answer: bytes) -> None:
        """Called by a follower."""
        self.num_bytes += len(answer)
        self.last_body = answer
        self._unanswered -= 1
        if not self._unanswered:
            self._all_answered.set()


class _Follower(asyncio.Transport):
    """The client's end. The gateway writes a whole answer at once."""

    def __init__(self, crowd: Crowd, front: Front, server: _Server) -> None:
        super().__init__()
        self._crowd = crowd
        self.connection = ClientConnection(front, server)
        self.connection.connection_made(self)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert isinstance(data, bytes) and data.startswith(b"HTTP/1.1 200")
        self._crowd.took(data)

    def get_extra_info(self, name: str, default: object = None) -> object:
        return ("memory", 0) if name == "peername" else default

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def close(self) -> None: ...
    def abort(self) -> None: ...


class _Server:
    closing = False

    def opened(self, connection: ClientConnection) -> None: ...
    def closed(self, connection: ClientConnection) -> None: ...


def _front(registry: RoleRegistry) -> Front:
    clock = SystemClock()
    roles = RoleSet({})
    roles.add(InferenceGateway(ROLE, registry, clock))
    router = Router()
    router.mount(roles)
    return Front(
        router=router,
        relays={},
        keys=Keys(None, None),
        limits=HttpLimits(),
        clock=clock,
        statistics=HttpStatistics(),
        ids=RequestIds(),
        heads=KnownHeads(),
        access_log=False,
    )
