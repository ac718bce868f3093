"""One request of the gateway's own to an engine, whose answer is read whole."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from phalanx.errors import DeadlineExceededError, RequestFailedError
from phalanx.gateway.http.fields import Pair
from phalanx.gateway.http.upstream import Upstream
from phalanx.gateway.http.upstream_pool import UpstreamPool
from phalanx.gateway.http.way import Place

MAX_ANSWER_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True)
class Fetched:
    """An engine's whole answer."""

    status: int
    body: bytes


async def fetch(upstreams: UpstreamPool, place: Place, payload: bytes) -> Fetched:
    """Send `payload`, a whole request, and read the answer; a cancelled call is cut off there.

    Raises `OSError` where no connection could be made, `RequestFailedError` where the answer did not
    come, and `DeadlineExceededError` where it took too long.
    """
    upstream = upstreams.idle(place.key) or await upstreams.connect(place)
    exchange = _Fetch(upstreams)
    upstream.carry(exchange, without_body=False, within_s=upstreams.limits.response_timeout_s)
    upstream.transport.write(payload)
    try:
        return await exchange.answer
    except BaseException:
        upstream.abort()
        raise


class _Fetch:
    """`answer` gets the response, or what became of it."""

    def __init__(self, upstreams: UpstreamPool) -> None:
        self._upstreams = upstreams
        self._parts: list[bytes] = []
        self._num_bytes = 0
        self.answer: asyncio.Future[Fetched] = asyncio.get_running_loop().create_future()

    def response(self, upstream: Upstream) -> None:
        for part in upstream.take():
            self._parts.append(bytes(part))
            self._num_bytes += len(part)
        if self._num_bytes > MAX_ANSWER_BYTES:
            self._fail(RequestFailedError(f"it answered more than {MAX_ANSWER_BYTES} bytes"))
        elif upstream.complete:
            answer = Fetched(upstream.status, b"".join(self._parts))
            self._done(upstream, answer, reusable=upstream.reusable)
        else:
            upstream.expect_more(self._upstreams.limits.response_timeout_s)

    def whole_response(self, upstream: Upstream, status: int, lines: bytes, body: bytes) -> None:
        self._done(upstream, Fetched(status, body), reusable=True)

    def interim(self, status: int, headers: list[Pair]) -> None:
        """Nobody waits for it."""

    def switched(self, tail: bytes) -> None:
        self._fail(RequestFailedError("it changed the protocol without being asked to"))

    def broken(self, why: str) -> None:
        self._fail(RequestFailedError(f"it {why}"))

    def late(self) -> None:
        limit_s = self._upstreams.limits.response_timeout_s
        self._fail(DeadlineExceededError(f"it has sent nothing for {limit_s:g} s"))

    def pause_upload(self) -> None:
        """The whole request was given to the transport."""

    def resume_upload(self) -> None:
        """The whole request was given to the transport."""

    def _done(self, upstream: Upstream, answer: Fetched, *, reusable: bool) -> None:
        if self.answer.done():
            return  # cancelled; whoever waited cuts the connection
        if reusable:
            self._upstreams.put(upstream)
        else:
            upstream.abort()
        self.answer.set_result(answer)

    def _fail(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)
