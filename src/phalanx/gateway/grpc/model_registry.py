"""`robot.inference.v1.ModelRegistry` of the gateway: model servers that register themselves."""

from __future__ import annotations

from phalanx.errors import ConfigurationError, NoServerError
from phalanx.gateway.grpc.service import Context, Service
from phalanx.gateway.http.router import Access
from phalanx.gateway.pool import Pool
from phalanx.routing.endpoint import Endpoint
from phalanx.wire.robot_inference import (
    MODEL_REGISTRY,
    HeartbeatAnswer,
    RegistrationAnswer,
    decode_heartbeat,
    decode_registration,
    encode_heartbeat_answer,
    encode_registration_answer,
)


class ModelRegistry:
    """Registering asks for the administration's key, where there is one: it brings requests."""

    def __init__(self, pool: Pool) -> None:
        self._registry = pool.registry

    def service(self) -> Service:
        return Service(
            MODEL_REGISTRY,
            unary={"Register": self._register, "Heartbeat": self._heartbeat},
            access=Access.ADMIN,
        )

    async def _register(self, request: bytes, context: Context) -> bytes:
        asked = decode_registration(request)
        try:
            server = self._registry.register_self(asked.model_name, Endpoint.parse(asked.endpoint))
        except (ConfigurationError, NoServerError) as error:
            return encode_registration_answer(RegistrationAnswer(False, message=str(error)))
        heartbeat_s = self._registry.policy.heartbeat_s
        return encode_registration_answer(RegistrationAnswer(True, server.server_id, heartbeat_s))

    async def _heartbeat(self, request: bytes, context: Context) -> bytes:
        server_id = decode_heartbeat(request)
        if self._registry.heartbeat(server_id):
            return encode_heartbeat_answer(HeartbeatAnswer(True))
        words = f"server {server_id[:80]!r} is not registered here (any more); register again"
        return encode_heartbeat_answer(HeartbeatAnswer(False, words))
