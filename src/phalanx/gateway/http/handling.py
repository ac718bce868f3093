"""Runs one handler for one request, in a task that ends with the client's connection."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from urllib.parse import parse_qsl, unquote

from phalanx.errors import PhalanxError
from phalanx.gateway.http.incoming_request import IncomingRequest
from phalanx.gateway.http.message import Handler, Headers, HttpRequest, HttpResponse
from phalanx.gateway.http.refusal import Refusal, refusal_of
from phalanx.gateway.http.work import Answerer

logger = logging.getLogger(__name__)


def request_for(
    request: IncomingRequest, request_id: str, peer: str, params: Mapping[str, str]
) -> HttpRequest:
    """What a handler gets. The request's body is there whole."""
    return HttpRequest(
        method=request.method,
        path=unquote(request.path),
        query=dict(parse_qsl(request.query, keep_blank_values=True)),
        headers=Headers(tuple(request.pairs)),
        body=b"".join(request.take()),
        disconnected=asyncio.Event(),
        request_id=request_id,
        params=params,
        peer=peer,
    )


class Handling:
    """A failure of the handler's own is answered with 500 and told in the log."""

    def __init__(self, caller: Answerer, handler: Handler, request: HttpRequest) -> None:
        self._caller = caller
        self._handler = handler
        self._request = request
        self._task: asyncio.Task[HttpResponse] | None = None

    @property
    def begun(self) -> bool:
        return False

    def start(self) -> None:
        self._task = asyncio.ensure_future(self._answer())
        self._task.add_done_callback(self._done)

    def arrived(self) -> None:
        """The body is there whole."""

    def cancel(self) -> None:
        self._request.disconnected.set()
        task, self._task = self._task, None
        if task is not None:
            task.cancel()

    def leave(self) -> None:
        """It is waited for."""

    def pause_response(self) -> None:
        """It is written at once."""

    def resume_response(self) -> None:
        """It is written at once."""

    async def _answer(self) -> HttpResponse:
        return await self._handler(self._request)

    def _done(self, task: asyncio.Task[HttpResponse]) -> None:
        if self._task is None:
            if not task.cancelled() and task.exception() is not None:
                _log_failure(self._request, task.exception())
            return
        self._task = None
        if task.cancelled():
            self._caller.refuse(Refusal(503, "cancelled", "the gateway stopped the request"))
            return
        error = task.exception()
        if error is None:
            self._caller.respond(task.result())
        elif isinstance(error, PhalanxError):
            self._caller.refuse(refusal_of(error))
        else:
            _log_failure(self._request, error)
            self._caller.refuse(Refusal(500, "internal_error", "the gateway failed; see its log"))


def _log_failure(request: HttpRequest, error: BaseException | None) -> None:
    logger.error(
        "%s %s failed",
        request.method,
        request.path,
        exc_info=error,
        extra={"rid": request.request_id},
    )
