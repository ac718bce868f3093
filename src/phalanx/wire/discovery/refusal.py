"""How a role says no: the errors of its resolver as JSON, and back as the same errors."""

from __future__ import annotations

import msgspec

from phalanx.errors import (
    EngineUnavailableError,
    InvalidRequestError,
    NoServerError,
    PhalanxError,
    RoleNotReadyError,
    UnknownModelError,
)
from phalanx.wire.openai.errors import error_type

NOT_READY = "not_ready"
UNKNOWN_MODEL = "unknown_model"
NO_SERVER = "no_server"
INVALID_REQUEST = "invalid_request"
UNAVAILABLE = "unavailable"


class _Error(msgspec.Struct, frozen=True):
    message: str
    type: str = ""
    param: str | None = None
    code: str | int | None = None


class _Refusal(msgspec.Struct, frozen=True):
    error: _Error


class _NotReady(msgspec.Struct, frozen=True):
    error: _Error
    role: str
    model: str | None
    state: str | None
    phase: str | None
    topology_revision: int
    registry_epoch: str
    retry_after_s: int


_refusal = msgspec.json.Decoder(_Refusal)
_not_ready = msgspec.json.Decoder(_NotReady)


def refusal_status(error: PhalanxError) -> int:
    """503 for what may be sent again later, 400 for what the caller has to correct."""
    return 503 if isinstance(error, EngineUnavailableError) else 400


def refusal_body(error: PhalanxError) -> bytes:
    """The JSON body for `error`, one of those that choosing a role's model or replica raises.

    It has OpenAI's shape, and beside it, where the model is not ready, what it does instead.
    """
    status = refusal_status(error)
    told = _Error(str(error), error_type(status), _field(error), _code(error))
    if not isinstance(error, RoleNotReadyError):
        return msgspec.json.encode(_Refusal(told))
    return msgspec.json.encode(
        _NotReady(
            told,
            error.role,
            error.model,
            error.state,
            error.phase,
            error.revision,
            error.epoch,
            error.retry_after_s,
        )
    )


def refusal_of(body: bytes) -> PhalanxError | None:
    """The error that `refusal_body` told of; None for any other body."""
    try:
        told = _refusal.decode(body).error
        if told.code == NOT_READY:
            return _not_ready_error(_not_ready.decode(body))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if told.code == UNKNOWN_MODEL:
        return UnknownModelError(told.message, field=told.param or "")
    if told.code == NO_SERVER:
        return NoServerError(told.message)
    return None


def _not_ready_error(told: _NotReady) -> RoleNotReadyError:
    return RoleNotReadyError(
        told.error.message,
        role=told.role,
        model=told.model,
        state=told.state,
        phase=told.phase,
        revision=told.topology_revision,
        epoch=told.registry_epoch,
        retry_after_s=told.retry_after_s,
    )


def _field(error: PhalanxError) -> str | None:
    return (error.field or None) if isinstance(error, InvalidRequestError) else None


def _code(error: PhalanxError) -> str:
    if isinstance(error, RoleNotReadyError):
        return NOT_READY
    if isinstance(error, UnknownModelError):
        return UNKNOWN_MODEL
    if isinstance(error, NoServerError):
        return NO_SERVER
    return UNAVAILABLE if isinstance(error, EngineUnavailableError) else INVALID_REQUEST
