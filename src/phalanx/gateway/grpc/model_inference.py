"""`robot.inference.v1.ModelInference` of the gateway: requests are passed on as they came."""

from __future__ import annotations

from phalanx.errors import InvalidRequestError
from phalanx.gateway.grpc.glance import request_head
from phalanx.gateway.grpc.message_reader import Pieces
from phalanx.gateway.grpc.service import Context, Service
from phalanx.gateway.inference import PolicyCaller
from phalanx.gateway.pool import Pool
from phalanx.routing.endpoint import Scheme
from phalanx.wire.robot_inference import (
    MODEL_INFERENCE,
    decode_health_request,
    encode_health_response,
)


class ModelInference:
    """Reads of a request whom it is for and which it is, and nothing else."""

    def __init__(self, pool: Pool, caller: PolicyCaller) -> None:
        self._pool = pool
        self._caller = caller

    def service(self) -> Service:
        return Service(
            MODEL_INFERENCE,
            unary={"CheckHealth": self._check_health},
            relayed={"Infer": self._infer},
            control=frozenset({"CheckHealth"}),
        )

    async def _infer(self, request: Pieces, context: Context) -> bytes:
        head = request_head(request)
        if not head.request_id:
            raise InvalidRequestError(
                "request_id is missing; give each request an id of its own", field="request_id"
            )
        answer = await self._caller.call(
            head.model_name or None, request, head.request_id, context.time_remaining()
        )
        if answer.metadata:
            context.set_trailing_metadata(answer.metadata)
        return answer.payload

    async def _check_health(self, request: bytes, context: Context) -> bytes:
        """Whether a server of the model is ready; without a name, whether any is."""
        name = decode_health_request(request)
        ready = self._pool.snapshot.ready
        healthy = any(scheme is Scheme.GRPC and name in ("", model) for model, scheme in ready)
        return encode_health_response(healthy)
