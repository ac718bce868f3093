"""Answers a judge's callers who send messages to `/generate`: their model renders them, through its
own chat completions, and they get its text.
"""

from __future__ import annotations

import os

from phalanx.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    NoServerError,
    PhalanxError,
    RequestFailedError,
)
from phalanx.gateway.http.message import JSON, Headers, HttpRequest, HttpResponse
from phalanx.gateway.http.refusal import Refusal
from phalanx.gateway.http.upstream_pool import UpstreamPool
from phalanx.gateway.http.way import NOBODY
from phalanx.gateway.roles.fetch import Fetched, fetch
from phalanx.gateway.roles.judge_request import (
    JudgeRequest,
    chat_request,
    judge_response,
    parse_judge_request,
)
from phalanx.gateway.roles.places import RolePlaces
from phalanx.gateway.roles.servers import RoleServers
from phalanx.gateway.roles.way import Kind, label, role_refusal, selector_of
from phalanx.routing.load import Ticket
from phalanx.routing.roles.affinity import AFFINITY_HEADER
from phalanx.routing.roles.balancer import RoleServer
from phalanx.routing.roles.snapshot import RoleModel

_ATTEMPTS = 2


class Judge:
    """For one role. `passes_authorization`: engines get the caller's own key."""

    def __init__(
        self,
        servers: RoleServers,
        places: RolePlaces,
        upstreams: UpstreamPool,
        *,
        passes_authorization: bool,
    ) -> None:
        self._servers = servers
        self._places = places
        self._upstreams = upstreams
        self._passed = (AFFINITY_HEADER, *(("authorization",) if passes_authorization else ()))

    async def answer(self, request: HttpRequest) -> HttpResponse:
        """A handler for `POST /generate` with messages."""
        try:
            asked = parse_judge_request(request.body)
            return await self._asked(asked, request)
        except (NoServerError, InvalidRequestError) as error:
            return role_refusal(error).response(request.path)

    async def _asked(self, asked: JudgeRequest, request: HttpRequest) -> HttpResponse:
        selector = selector_of(asked)
        affinity = request.headers.get(AFFINITY_HEADER) or None
        tried = NOBODY
        why = ""
        for _ in range(_ATTEMPTS):
            try:
                model, ticket = self._servers.acquire(selector, affinity, tried)
            except NoServerError:
                if tried:
                    break
                raise
            with ticket:
                try:
                    return await self._at(ticket, model, asked, request)
                except OSError as error:
                    why = os.strerror(error.errno) if error.errno else "no answer in time"
                    ticket.outcome("503", message=why)
                    self._servers.unreachable(ticket.server)
                    tried |= {ticket.server.server_id}
        raise NoServerError(f"no server could be reached ({why}); the request was not started")

    async def _at(
        self,
        ticket: Ticket[RoleServer],
        model: RoleModel,
        asked: JudgeRequest,
        request: HttpRequest,
    ) -> HttpResponse:
        place = self._places.of(ticket.server.base_url or "")
        body = chat_request(asked, model)
        head = b"POST %b%b HTTP/1.1\r\n%bcontent-type: application/json\r\n" % (
            place.prefix,
            Kind.CHAT.value,
            place.host_line,
        )
        lines = [f"{name}: {request.headers.get(name)}\r\n" for name in self._passed]
        lines = [line for line in lines if not line.endswith(": \r\n")]
        lines.append(f"x-request-id: {request.request_id}\r\nvia: 1.1 phalanx\r\n")
        lines.append(f"content-length: {len(body)}\r\n\r\n")
        payload = head + "".join(lines).encode("latin-1") + body
        fields = label(model.name)
        try:
            fetched = await fetch(self._upstreams, place, payload)
            ticket.outcome(str(fetched.status))
            return _response(fetched, fields)
        except RequestFailedError as error:
            status = 504 if isinstance(error, DeadlineExceededError) else 502
            ticket.outcome(str(status), message=str(error))
            return _failure(status, place.title, error, fields).response(request.path)


def _response(fetched: Fetched, fields: bytes) -> HttpResponse:
    """An engine's refusal passes on as it came."""
    good = 200 <= fetched.status < 300
    body = judge_response(fetched.body) if good else fetched.body
    pairs = [(b"content-type", JSON.encode())]
    if fields:
        name, _, value = fields[2:].partition(b": ")
        pairs.append((name, value))
    return HttpResponse(fetched.status, body, Headers(tuple(pairs)))


def _failure(status: int, title: str, error: PhalanxError, fields: bytes) -> Refusal:
    code = "timeout" if status == 504 else "bad_gateway"
    message = (
        f"{title} failed: {error}; the request may have been started, so it was not sent again"
    )
    return Refusal(status, code, message, fields=fields)
