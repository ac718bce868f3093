"""Sends a role's requests: to engines as discovery shows them, or to the gateway.

A request is sent once. Where its model is not ready, or no connection could be made, the snapshot is
refreshed and the choice made again, once, before anything was sent; afterwards nothing is repeated.
"""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from phalanx.client.roles.following import RoleFollower
from phalanx.client.roles.http_exchange import (
    HttpAnswer,
    HttpCall,
    HttpExchange,
    NotConnectedError,
)
from phalanx.client.roles.request import RoleRequest
from phalanx.client.roles.role_url import RoleUrl
from phalanx.client.roles.settings import Mode, RoleClientSettings, bearer
from phalanx.clock import Clock
from phalanx.errors import (
    EngineUnavailableError,
    InvalidRequestError,
    NoServerError,
    RequestFailedError,
)
from phalanx.routing.load import Ticket
from phalanx.routing.roles.balancer import RoleBalancer, RoleServer
from phalanx.routing.roles.snapshot import RoleModel


class StartedAnswer:
    """An answer whose head has come, and the count of its request, which ends with it.

    `lost` is called where the rest does not come.
    """

    def __init__(
        self,
        answer: HttpAnswer,
        ticket: Ticket[RoleServer] | None = None,
        lost: Callable[[], None] = lambda: None,
    ) -> None:
        self._answer = answer
        self._ticket = ticket
        self._lost = lost

    async def read(self) -> bytes:
        """The whole body. Raises `EngineUnavailableError` where it breaks off."""
        return b"".join([part async for part in self.parts()])

    async def parts(self) -> AsyncGenerator[bytes, None]:
        """The body as it comes. Raises `EngineUnavailableError` where it breaks off."""
        try:
            async with aclosing(self._answer.parts()) as parts:
                async for part in parts:
                    yield part
        except EngineUnavailableError:
            self._lost()
            raise

    async def close(self) -> None:
        """Any number of times."""
        try:
            await self._answer.close()
        finally:
            if self._ticket is not None:
                self._ticket.release()


class RoutedCalls:
    """Belongs to one event loop. The caller bounds the time and may cancel."""

    def __init__(
        self,
        url: RoleUrl,
        mode: Mode,
        api_key: str | None,
        settings: RoleClientSettings,
        clock: Clock,
    ) -> None:
        self.http = HttpExchange(settings)
        self.follower = RoleFollower(self.http, url, api_key, settings)
        self._url = url
        self._mode = mode
        self._headers = bearer(api_key)
        self._engine_headers = bearer(settings.engine_api_key)
        # Many clients begin at once, and not all with the same replica.
        self._balancer = RoleBalancer(clock, first_turn=lambda: -random.getrandbits(30))
        self.follower.mirror.listen(self._balancer.keep)

    async def start(self, request: RoleRequest) -> StartedAnswer:
        """Send it; returns when the head of its answer has come. The reader closes it."""
        if self._url.is_engine:
            return await self._at_engine(request)
        if self._mode == "gateway":
            return await self._at_gateway(request)
        if request.needs_gateway:
            if self._mode == "auto":
                return await self._at_gateway(request)
            raise InvalidRequestError(
                "messages are answered by the gateway, not by an engine's /generate; use chat, or"
                " mode='gateway' or 'auto'",
                field="messages",
            )
        try:
            ticket, answer = await self._direct(request)
        except _NothingSentError as ended:
            if self._mode == "auto":
                return await self._at_gateway(request)
            raise ended.failure from ended.failure.__cause__
        return StartedAnswer(answer, ticket, self.follower.doubt)

    async def get(self, path: str) -> bytes:
        """What the role (or the engine) answers at `path`."""
        return await self.http.get(HttpCall(self._url.base + path, headers=self._headers))

    async def close(self) -> None:
        await self.follower.close()
        await self.http.close()

    async def _at_gateway(self, request: RoleRequest) -> StartedAnswer:
        headers = {**self._headers, **request.headers}
        url = self._url.base + request.path
        return StartedAnswer(await self.http.open(HttpCall(url, request.for_gateway(), headers)))

    async def _at_engine(self, request: RoleRequest) -> StartedAnswer:
        headers = {**self._headers, **request.headers}
        url = self._url.base + request.path
        call = HttpCall(url, request.for_engine(None), headers, by_gateway=False)
        return StartedAnswer(await self.http.open(call))

    async def _direct(self, request: RoleRequest) -> tuple[Ticket[RoleServer], HttpAnswer]:
        """Raises `_NothingSentError` where no replica could be had, also after a second look."""
        try:
            snapshot = await self.follower.current()
        except NoServerError as error:
            raise _NothingSentError(error) from error
        tried: frozenset[str] = frozenset()
        failure: NotConnectedError | None = None
        for is_last in (False, True):
            try:
                model, ticket = self._balancer.acquire(
                    snapshot,
                    request.selector,
                    direct=True,
                    affinity=request.affinity,
                    exclude=tried,
                )
            except NoServerError as error:
                if is_last:
                    raise _NothingSentError(failure or error) from error
            else:
                try:
                    return ticket, await self._sent(request, model, ticket)
                except NotConnectedError as error:
                    tried |= {ticket.server.server_id}
                    failure = error
            if not is_last:
                snapshot = await self.follower.refresh()
        assert failure is not None
        self.follower.doubt()
        raise _NothingSentError(failure) from failure

    async def _sent(
        self, request: RoleRequest, model: RoleModel, ticket: Ticket[RoleServer]
    ) -> HttpAnswer:
        """The head of the answer; whatever happens instead, the request is counted no more."""
        url = f"{ticket.server.base_url}".rstrip("/") + request.path
        headers = {**self._engine_headers, **request.headers}
        call = HttpCall(url, request.for_engine(model), headers, by_gateway=False)
        try:
            return await self.http.open(call)
        except BaseException as error:
            ticket.release()
            if isinstance(error, EngineUnavailableError | RequestFailedError):
                self.follower.doubt()
            raise


class _NothingSentError(Exception):
    """No byte of the request was sent; `failure` says why, as callers are told."""

    def __init__(self, failure: EngineUnavailableError) -> None:
        super().__init__(str(failure))
        self.failure = failure
