"""What stands behind the gRPC port of a policy server: nothing yet, or the policy."""

from __future__ import annotations

from functools import partial
from typing import Protocol

from phalanx.errors import InvalidRequestError
from phalanx.schema.observation import Actions, Observation
from phalanx.server.policy.failures import NotReadyError
from phalanx.server.policy.service import Encode, PolicyService, Times
from phalanx.wire.robot_inference import (
    InferenceAnswer,
    RequestHead,
    decode_request,
    encode_response,
)


class Backend(Protocol):
    """Answers the calls of `robot.inference.v1.ModelInference`."""

    async def infer(self, head: RequestHead, data: bytes) -> bytes:
        """The response to the request `data`, whose head has been read. In the server's loop."""
        ...

    def healthy(self, model_name: str) -> bool:
        """Whether requests for the model (an empty name: the one that there is) are answered.

        Asked on another thread than the server's: it looks, and waits for nothing.
        """
        ...


class StartingBackend:
    """While the model loads."""

    async def infer(self, head: RequestHead, data: bytes) -> bytes:
        raise NotReadyError("the server is starting; try again later or elsewhere")

    def healthy(self, model_name: str) -> bool:
        return False


class PolicyBackend:
    """A policy that is served."""

    def __init__(self, service: PolicyService) -> None:
        self._service = service

    async def infer(self, head: RequestHead, data: bytes) -> bytes:
        if not head.request_id:
            raise InvalidRequestError(
                "request_id is missing; give each request an id of its own", field="request_id"
            )
        self._service.check_model(head.model_name)
        return await self._service.answer(partial(_read, data))

    def healthy(self, model_name: str) -> bool:
        """Raises `UnknownModelError` for a model that is not served here."""
        self._service.check_model(model_name)
        return self._service.failure is None


def _read(data: bytes) -> tuple[Observation, Encode[bytes]]:
    call = decode_request(data)
    return call.observation, partial(_response, call.request_id)


def _response(request_id: str, actions: Actions, times: Times) -> bytes:
    return encode_response(InferenceAnswer(request_id, actions, round(times.total_s * 1e6)))
