"""What every route that reads a body does: read it within the limit, answer while the client is
there, and turn what goes wrong before the answer begins into its status."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from phalanx.errors import EngineOverloadedError, InvalidRequestError, PhalanxError
from phalanx.server.connection import while_connected
from phalanx.server.dialects import Dialect, Refusals
from phalanx.server.http_body import read_body
from phalanx.server.metrics import Outcome, ServerMetrics

CLIENT_LEFT = 499
"""The status that is logged where nobody is left to read one."""

Work = Callable[[bytes], Coroutine[Any, Any, Response]]


class Answering:
    """Shared by the routes of one server."""

    def __init__(
        self,
        max_bytes: int,
        refusals: Refusals,
        metrics: ServerMetrics,
        *,
        key: str = "max_request_bytes",
    ) -> None:
        """The configuration calls the largest body, `max_bytes`, by the name `key`."""
        self._max_bytes, self._key = max_bytes, key
        self._refusals = refusals
        self._metrics = metrics

    async def model(self, request: Request, dialect: Dialect, work: Work) -> Response:
        """The answer of `work`, a request for the model; counted where it is refused."""
        try:
            return await self._answer(request, work)
        except PhalanxError as error:
            if isinstance(error, EngineOverloadedError):
                self._metrics.ended(Outcome.OVERLOADED)
            elif isinstance(error, InvalidRequestError):
                self._metrics.ended(Outcome.REFUSED)
            return self._refusals.of(error, dialect)

    async def control(self, request: Request, dialect: Dialect, work: Work) -> Response:
        """The answer of `work`, an operation on the server."""
        try:
            return await self._answer(request, work)
        except PhalanxError as error:
            return self._refusals.of(error, dialect)

    async def _answer(self, request: Request, work: Work) -> Response:
        try:
            body = await read_body(request, self._max_bytes, self._key)
            return await while_connected(request.receive, work(body))
        except ClientDisconnect:
            return Response(status_code=CLIENT_LEFT)
