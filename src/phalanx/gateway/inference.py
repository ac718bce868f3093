"""Sends a policy's request to a server of its model: what every robot protocol of the gateway ends in.

A request is sent once. Only where it provably never started, for want of a connection or by the
server's own word, does it go to one other server.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import grpc

from phalanx.errors import (
    InvalidRequestError,
    MalformedRequestError,
    NoServerError,
    RequestFailedError,
)
from phalanx.gateway.grpc.channels import Channels
from phalanx.gateway.grpc.glance import response_head
from phalanx.gateway.grpc.message_reader import Pieces
from phalanx.gateway.grpc.metadata import Metadata
from phalanx.gateway.grpc.rpc_error import RpcError
from phalanx.gateway.grpc.upstream import NotConnectedError
from phalanx.gateway.pool import Pool
from phalanx.routing.endpoint import Scheme
from phalanx.routing.load import Ticket
from phalanx.wire.robot_inference import (
    NOT_STARTED,
    InferenceAnswer,
    InferenceCall,
    decode_response,
    encode_request,
)

MAX_TIMEOUT_S = 600.0
MAX_SERVERS = 2
"""That a request is offered to, one after the other."""


class UpstreamError(RequestFailedError):
    """A server's own refusal or failure, as it gave it; or what the gateway found instead of an
    answer.
    """

    def __init__(self, code: grpc.StatusCode, message: str, metadata: Metadata = ()) -> None:
        super().__init__(message)
        self.code = code
        self.metadata = metadata

    @property
    def not_started(self) -> bool:
        """Whether the server says so."""
        return (NOT_STARTED, "1") in self.metadata


@dataclass(frozen=True)
class UpstreamAnswer:
    """An `InferenceResponse`, its request id compared, and the server's trailing metadata."""

    payload: bytes
    metadata: Metadata


@dataclass(frozen=True)
class _Request:
    """`end_s` is its deadline by the event loop's clock."""

    payload: Pieces
    request_id: str
    end_s: float


class PolicyCaller:
    """Belongs to the gateway's event loop. Cancelling a call cancels it at the server."""

    def __init__(
        self, pool: Pool, channels: Channels, *, max_timeout_s: float = MAX_TIMEOUT_S
    ) -> None:
        self._pool = pool
        self._channels = channels
        self._max_timeout_s = max_timeout_s

    async def infer(
        self, model: str | None, payload: bytes, request_id: str, timeout_s: float | None = None
    ) -> bytes:
        """The answer to `payload`, an `InferenceRequest` of that id. See `call`."""
        return (await self.call(model, (payload,), request_id, timeout_s)).payload

    async def call(
        self, model: str | None, payload: Pieces, request_id: str, timeout_s: float | None = None
    ) -> UpstreamAnswer:
        """Send the request to a ready server of `model`, None being the only model there is.

        It may take `timeout_s`, and the gateway's own longest time at most. Raises
        `UnknownModelError` and `NoServerError` where no server takes it, and `UpstreamError` for
        everything that happens after that.
        """
        longest_s = self._max_timeout_s
        allowed_s = longest_s if timeout_s is None else min(timeout_s, longest_s)
        end_s = asyncio.get_running_loop().time() + allowed_s
        request = _Request(payload, request_id, end_s)
        tried: frozenset[str] = frozenset()
        failure: UpstreamError | NotConnectedError | None = None
        while len(tried) < MAX_SERVERS:
            try:
                ticket = self._pool.acquire(model, Scheme.GRPC, tried)
            except NoServerError:
                if isinstance(failure, UpstreamError):
                    raise failure from None
                raise
            with ticket:
                tried |= {ticket.server.server_id}
                try:
                    return await self._at(ticket, request)
                except NotConnectedError as error:
                    self._pool.connect_failed(ticket.server.server_id, str(error))
                    failure = error
                except UpstreamError as error:
                    if not error.not_started:
                        raise
                    failure = error
        if isinstance(failure, UpstreamError):
            raise failure
        raise NoServerError("no server takes connections; send the request again later")

    async def answer(
        self,
        call: InferenceCall,
        timeout_s: float | None = None,
        *,
        payload: bytes | None = None,
    ) -> InferenceAnswer:
        """The answer to an observation. A server's answer that is none is an `UpstreamError`.

        `payload` is `call` as a message, where another thread has written it.
        """
        payload = encode_request(call) if payload is None else payload
        got = await self.infer(call.model_name or None, payload, call.request_id, timeout_s)
        try:
            answer = decode_response(got)
        except InvalidRequestError as error:
            raise _unreadable(error) from error
        shape, rows = answer.actions.values.shape, call.observation.num_rows
        if (len(shape) != 3 or shape[0] != rows) if call.observation.batched else len(shape) != 2:
            raise UpstreamError(
                grpc.StatusCode.DATA_LOSS,
                f"the server answered actions of shape {shape} to "
                f"{f'a batch of {rows}' if call.observation.batched else 'a single observation'}",
            )
        return answer

    async def _at(self, ticket: Ticket, request: _Request) -> UpstreamAnswer:
        """At one server, whose ticket learns how it ended."""
        try:
            answer = await self._sent(ticket, request)
            head = response_head(answer.payload)
            if head.request_id != request.request_id:
                raise UpstreamError(
                    grpc.StatusCode.DATA_LOSS,
                    f"the server answered request {head.request_id!r:.80} instead of "
                    f"{request.request_id!r:.80}",
                )
        except NotConnectedError as error:
            ticket.outcome(grpc.StatusCode.UNAVAILABLE.name, message=str(error))
            raise
        except UpstreamError as error:
            ticket.outcome(error.code.name, message=str(error))
            raise
        except MalformedRequestError as error:
            failure = _unreadable(error)
            ticket.outcome(failure.code.name, message=str(failure))
            raise failure from error
        ticket.outcome(grpc.StatusCode.OK.name, served_s=_served_s(head.inference_time_us))
        return answer

    async def _sent(self, ticket: Ticket, request: _Request) -> UpstreamAnswer:
        try:
            payload, metadata = await self._channels.infer(
                ticket.server.endpoint, request.payload, request.end_s
            )
        except TimeoutError:
            raise UpstreamError(
                grpc.StatusCode.DEADLINE_EXCEEDED, "there was no connection before the deadline"
            ) from None
        except RpcError as error:
            words = error.details or error.code.name
            raise UpstreamError(error.code, words, error.metadata) from error
        return UpstreamAnswer(payload, metadata)


def _unreadable(error: InvalidRequestError) -> UpstreamError:
    return UpstreamError(grpc.StatusCode.DATA_LOSS, f"the server's answer cannot be read: {error}")


def _served_s(inference_time_us: int) -> float | None:
    return inference_time_us / 1e6 if inference_time_us else None
