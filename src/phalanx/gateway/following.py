"""Mirrors the pool of another gateway, so that several gateways have the same servers.

Who is registered is the other gateway's to say, over a long poll; each of them probes for itself and
counts its own requests. While the other cannot be reached, the last known servers stay; also where
it has started anew and has none: then it has lost them.
"""

from __future__ import annotations

import asyncio
import logging
import ssl

import msgspec

from phalanx.clock import Clock
from phalanx.errors import ConfigurationError, MalformedRequestError
from phalanx.gateway.alarm import Alarm
from phalanx.gateway.gateway_url import GatewayUrl
from phalanx.gateway.http_get import get
from phalanx.routing.endpoint import Endpoint
from phalanx.routing.pool_registry import PoolRegistry
from phalanx.routing.registration import identify
from phalanx.routing.snapshot import ServerState

logger = logging.getLogger(__name__)
POLL_S = 20.0
GRACE_S = 5.0
RETRY_S = 0.5


class _LeaderServer(msgspec.Struct, frozen=True):
    model_name: str
    endpoint: str
    state: str


class _LeaderPool(msgspec.Struct, frozen=True):
    epoch: str
    revision: int
    servers: tuple[_LeaderServer, ...]


class Follower:
    """`run` goes on until it is cancelled; `lost` says in words why the leader is not heard, or not
    followed.
    """

    def __init__(
        self, registry: PoolRegistry, clock: Clock, leader: GatewayUrl, key: str | None
    ) -> None:
        self._registry = registry
        self._alarm = Alarm(clock)
        self._clock = clock
        self._leader = leader
        self._headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self._tls = ssl.create_default_context() if leader.tls else None
        self.lost = "it has not answered yet"
        self._mirrored_epoch: str | None = None

    async def run(self) -> None:
        seen: _LeaderPool | None = None
        while True:
            try:
                async with asyncio.timeout(POLL_S + GRACE_S):
                    seen, fault = await self._poll(seen)
            except (OSError, TimeoutError, MalformedRequestError) as error:
                seen = None  # the next answer is not waited for
                self._note(str(error) or "it does not answer")
                await self._alarm.wait(self._clock.monotonic_s() + RETRY_S)
            else:
                self._note(fault)

    async def _poll(self, seen: _LeaderPool | None) -> tuple[_LeaderPool, str]:
        """What the leader has when that is other than what was seen, and why it is not followed."""
        target = "/v1/pool?detail=0"
        if seen is not None:
            target += f"&epoch={seen.epoch}&after={seen.revision}&wait_s={POLL_S:g}"
        leader = self._leader
        status, body = await get(
            leader.host, leader.port, target, headers=self._headers, tls=self._tls
        )
        if status == 401:
            raise MalformedRequestError("it refuses the key; give its --admin-key to this gateway")
        if status != 200:
            raise MalformedRequestError(f"GET /v1/pool answered {status}")
        try:
            pool = msgspec.json.decode(body, type=_LeaderPool)
            fault = self._mirror(pool)
        except (
            msgspec.DecodeError,
            UnicodeDecodeError,
            RecursionError,
            ConfigurationError,
        ) as error:
            raise MalformedRequestError(f"GET /v1/pool answered something else: {error}") from None
        return pool, fault

    def _mirror(self, pool: _LeaderPool) -> str:
        if not pool.servers and self._mirrored_epoch not in (None, pool.epoch):
            return "it has started anew and has no servers yet"
        mirror(self._registry, pool)
        self._mirrored_epoch = pool.epoch
        return ""

    def _note(self, lost: str) -> None:
        if lost and lost != self.lost:
            known = self._mirrored_epoch is not None
            stays = "its servers stay" if known else "none of its servers is known yet"
            logger.warning("the gateway that is followed: %s; %s", lost, stays)
        elif self.lost and not lost:
            logger.info("following %s:%d", self._leader.host, self._leader.port)
        self.lost = lost


def mirror(registry: PoolRegistry, pool: _LeaderPool) -> None:
    """Register what the leader has, and remove what it has not (any more)."""
    wanted = {
        identify(server.model_name, endpoint): (server.model_name, endpoint)
        for server in pool.servers
        if server.state != ServerState.DRAINING
        for endpoint in (Endpoint.parse(server.endpoint),)
    }
    for server in registry.publisher.snapshot.servers:
        if server.server_id not in wanted:
            registry.remove(server.server_id)
    for model_name, endpoint in wanted.values():
        registry.register_managed(model_name, endpoint)
