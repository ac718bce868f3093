"""Follows a role's discovery: one long poll at a time, for all requests of a client.

While the gateway cannot be reached the last snapshot stays.
"""

from __future__ import annotations

import asyncio
import logging
import random
from urllib.parse import quote

from phalanx.client.roles.http_exchange import HttpCall, HttpExchange
from phalanx.client.roles.role_url import RoleUrl
from phalanx.client.roles.settings import RoleClientSettings, bearer
from phalanx.errors import (
    EngineUnavailableError,
    InvalidInputError,
    NoServerError,
    PhalanxError,
    RequestFailedError,
)
from phalanx.routing.roles.documents import snapshot_of
from phalanx.routing.roles.mirror import RoleMirror
from phalanx.routing.roles.snapshot import RoleContent, RoleSnapshot
from phalanx.schema.roles import RoutingSpec, WorkloadType
from phalanx.wire.discovery import DiscoveryDocument, decode_discovery

logger = logging.getLogger(__name__)
GRACE_S = 5.0
MAX_PAUSES = 10
_UNHEARD = -1


class RoleFollower:
    """Belongs to one event loop. It asks from the first time that a snapshot is wanted, until it is
    closed.
    """

    def __init__(
        self, http: HttpExchange, url: RoleUrl, api_key: str | None, settings: RoleClientSettings
    ) -> None:
        nothing = RoleContent(WorkloadType.ROLLOUT, RoutingSpec())
        self.mirror = RoleMirror(RoleSnapshot(url.role, "", _UNHEARD, nothing))
        self._http = http
        self._url = f"{url.base}/engines"
        self._headers = bearer(api_key)
        self._poll_s = settings.poll_s
        self._retry_s = settings.retry_s
        self._num_asked = 0
        self._refreshed = 0
        self._stale = False
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._lost = ""

    @property
    def heard(self) -> bool:
        """Whether there is a snapshot."""
        return self.mirror.snapshot.revision != _UNHEARD

    @property
    def lost(self) -> str:
        """Why the gateway cannot be asked; empty where it can, or has not been yet."""
        return self._lost

    def start(self) -> None:
        """Follow from now on."""
        if "follow" not in self._tasks:
            self._tasks["follow"] = asyncio.create_task(self._follow())

    async def current(self) -> RoleSnapshot:
        """The newest snapshot that is known; asked for where there is none, or it was in doubt.

        Raises `NoServerError` where there is none to be had, and `ConfigurationError`
        where the gateway refuses to tell.
        """
        self.start()
        if self._stale or not self.heard:
            await self.refresh()
        return self.mirror.snapshot

    async def refresh(self) -> RoleSnapshot:
        """Ask now, together with others. Without an answer the last snapshot stays, where there is
        one.
        """
        wanted = self._num_asked + 1
        while self._refreshed < wanted:
            running = self._tasks.get("refresh")
            if running is None or running.done():
                running = self._tasks["refresh"] = asyncio.create_task(self._refresh())
            await asyncio.shield(running)  # which may have asked before this was called
        return self.mirror.snapshot

    def doubt(self) -> None:
        """Something has failed that the snapshot did not foresee: ask before it is used again."""
        self._stale = True

    async def ask(self, query: str = "") -> DiscoveryDocument:
        """The document that the gateway answers now; its snapshot is taken where it is newer."""
        self._num_asked += 1
        body = await self._http.get(HttpCall(self._url + query, headers=self._headers))
        try:
            document = decode_discovery(body)
            snapshot = snapshot_of(document)
        except InvalidInputError as error:
            raise RequestFailedError(f"{self._url} cannot be followed: {error}") from error
        self.mirror.put(snapshot)
        return document

    async def close(self) -> None:
        """Follow no longer. Who waits for a snapshot gets the last one."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self.mirror.close()

    async def _refresh(self) -> None:
        self._stale = False
        asked = self._num_asked + 1
        try:
            async with asyncio.timeout(GRACE_S):
                await self.ask()
        except (EngineUnavailableError, RequestFailedError, TimeoutError) as error:
            if not self.heard:
                raise _unheard(self._url, error) from error
        self._refreshed = asked

    async def _follow(self) -> None:
        pause_s = self._retry_s
        loop = asyncio.get_running_loop()
        while True:
            seen, began_s = self.mirror.snapshot, loop.time()
            try:
                async with asyncio.timeout(self._poll_s + GRACE_S):
                    await (self.ask(self._query(seen)) if self.heard else self.refresh())
            except (PhalanxError, TimeoutError) as error:
                self._note(str(error) or "it does not answer")
                await asyncio.sleep(_jittered(pause_s))
                pause_s = min(2 * pause_s, MAX_PAUSES * self._retry_s)
                continue
            self._note("")
            pause_s = self._retry_s
            if self.mirror.snapshot is seen and loop.time() - began_s < self._poll_s / 2:
                await asyncio.sleep(_jittered(self._retry_s))  # it does not wait for changes

    def _query(self, seen: RoleSnapshot) -> str:
        # Not all followers of a gateway shall ask again at the same moment.
        wait_s = self._poll_s * random.uniform(0.75, 1.0)
        return f"?after={seen.revision}&epoch={quote(seen.epoch, safe='')}&wait_s={wait_s:.3f}"

    def _note(self, lost: str) -> None:
        if lost and not self._lost:
            stays = "its last snapshot stays" if self.heard else "nothing is known of it yet"
            logger.warning("discovery of %s: %s; %s", self._url, lost, stays)
        elif self._lost and not lost:
            logger.info("following %s", self._url)
        self._lost = lost


def _unheard(url: str, error: Exception) -> NoServerError:
    """Whatever discovery's request came to: the caller's own was not sent."""
    why = str(error) or f"it has not answered for {GRACE_S:g} s"
    return NoServerError(f"discovery cannot be had from {url}: {why}")


def _jittered(seconds: float) -> float:
    return seconds * random.uniform(0.5, 1.5)
