"""Relays requests to HTTP backends: the servers to choose from, connections to them, and settings."""

from __future__ import annotations

from typing import Protocol

from phalanx.errors import (
    BodyTooLargeError,
    DeadlineExceededError,
    EngineUnavailableError,
    InvalidInputError,
    MalformedRequestError,
    NoServerError,
    PhalanxError,
    UnknownModelError,
)
from phalanx.gateway.http.limits import HttpLimits
from phalanx.gateway.http.refusal import Refusal
from phalanx.gateway.http.upstream_pool import UpstreamPool
from phalanx.routing.endpoint import Scheme
from phalanx.routing.load import Ticket

NOBODY: frozenset[str] = frozenset()
_STATUSES: tuple[tuple[type[PhalanxError], int, str], ...] = (
    (UnknownModelError, 404, "model_not_found"),
    (MalformedRequestError, 400, "malformed_request"),
    (BodyTooLargeError, 413, "body_too_large"),
    (InvalidInputError, 400, "invalid_request"),
    (DeadlineExceededError, 504, "timeout"),
    (EngineUnavailableError, 503, "unavailable"),
    (PhalanxError, 500, "internal_error"),
)
"""More specific classes come before their bases."""


class ServerPool(Protocol):
    """The gateway's pool, as a relay sees it."""

    def acquire(
        self, model: str | None, scheme: Scheme, exclude: frozenset[str] = NOBODY
    ) -> Ticket:
        """Choose and count in one step. Raises `UnknownModelError` or `NoServerError`."""
        ...

    def connect_failed(self, server_id: str, detail: str = "") -> None:
        """It does not listen: it gets nothing until it answers again. `detail`: why, in words."""
        ...


class Relay:
    """`default_model` answers requests that name none; `passes_authorization` says whether the
    caller's key is sent on to the backend.
    """

    def __init__(
        self,
        pool: ServerPool,
        *,
        default_model: str | None = None,
        passes_authorization: bool = False,
        limits: HttpLimits | None = None,
    ) -> None:
        self.pool = pool
        self.passes_authorization = passes_authorization
        self.limits = limits or HttpLimits()
        self.upstreams = UpstreamPool(self.limits)
        self.default_model = default_model

    def close(self) -> None:
        """Close the connections that no request has."""
        self.upstreams.close()


def refusal_of(error: PhalanxError) -> Refusal:
    """The HTTP words of what kept a request from being sent on."""
    if isinstance(error, NoServerError):
        return Refusal(503, "no_server", str(error), retry_after_s=error.retry_after_s)
    status, code = next(row[1:] for row in _STATUSES if isinstance(error, row[0]))
    return Refusal(status, code, str(error), retry_after_s=1 if status == 503 else 0)
