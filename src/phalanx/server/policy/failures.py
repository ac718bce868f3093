"""How a request to a policy can fail inside the server, beyond what the engine raises itself."""

from __future__ import annotations

import torch

from phalanx.engine.boundary import Raised
from phalanx.errors import EngineUnavailableError, InvalidRequestError, RequestFailedError


class NotReadyError(EngineUnavailableError):
    """The server takes no requests now. This one never started and may be sent elsewhere."""


class UnauthenticatedError(InvalidRequestError):
    """The request does not carry the server's key."""


class RequestAbortedError(RequestFailedError):
    """The server or its operator ended the request."""


class OutOfMemoryError(RequestFailedError):
    """The device had no memory left for the request."""


class AnswerMismatchError(RequestFailedError):
    """What came back is not the answer to what was asked."""


class PolicyFailedError(RequestFailedError):
    """The adapter or the model failed; the log has the cause, the message does not."""


def policy_failure(raised: Raised) -> Exception:
    """What to raise for an error of the adapter or the engine: with words for the caller where the
    error is the caller's, else without what it says of the inside.

    A `BaseException` that is no `Exception`, such as an interrupt, is raised here.
    """
    error = raised.error
    if isinstance(error, InvalidRequestError | EngineUnavailableError | AnswerMismatchError):
        return error
    if not isinstance(error, Exception):
        raise error
    failure: RequestFailedError
    if any(_is_out_of_memory(each) for each in _causes(error)):
        failure = OutOfMemoryError(
            "the policy's device ran out of memory; send smaller batches, or serve it with a "
            "smaller max_batch_size"
        )
    elif isinstance(error, PolicyFailedError):
        return error
    else:
        failure = PolicyFailedError("the policy failed; the log of its server tells why")
    failure.__cause__ = error
    return failure


def _is_out_of_memory(error: BaseException) -> bool:
    """Also of a worker's error, whose class is in its notes alone."""
    notes: list[str] = vars(error).get("__notes__", [])
    known = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return known or any("OutOfMemoryError" in note for note in notes)


def _causes(error: BaseException) -> list[BaseException]:
    """The error, what caused it, and so on."""
    found: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in found:
        found.append(cause)
        cause = cause.__cause__
    return found
