"""gRPC in the gateway benchmark: a backend that answers at once, and the load, both grpc.aio."""

from __future__ import annotations

import asyncio
import time

import grpc
import numpy as np
from gateway_traffic import KEY  # type: ignore[import-not-found]

from phalanx.schema.observation import Actions, Observation
from phalanx.wire.robot_inference import (
    CHECK_HEALTH,
    INFER,
    InferenceAnswer,
    InferenceCall,
    encode_health_response,
    encode_request,
    encode_response,
)

POLICY = "p"
_ID = "benchmark"
_OPTIONS = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))


def _observation() -> bytes:
    """Three images and a state: 600 KB."""
    noise = np.random.default_rng(0)
    images = {
        f"camera_{number}": noise.integers(0, 256, (224, 224, 3), np.uint8) for number in range(3)
    }
    state = noise.standard_normal(37_104).astype(np.float32)
    return encode_request(
        InferenceCall(
            request_id=_ID,
            model_name=POLICY,
            timestamp_ns=0,
            observation=Observation(images=images, state=state),
        )
    )


def _answer() -> bytes:
    actions = Actions(np.zeros((50, 32), np.float32))
    return encode_response(InferenceAnswer(request_id=_ID, actions=actions, inference_time_us=1))


class GrpcBackend(grpc.GenericRpcHandler):
    """Answers `Infer` and `CheckHealth` with prepared bytes."""

    def __init__(self) -> None:
        self._answers = {INFER: _answer(), CHECK_HEALTH: encode_health_response(True)}

    async def listen(self) -> int:
        self._server = grpc.aio.server(options=_OPTIONS)
        self._server.add_generic_rpc_handlers((self,))
        port: int = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return port

    async def close(self) -> None:
        await self._server.stop(0)

    def service(self, call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        answer = self._answers.get(call.method)
        if answer is None:
            return None

        async def handle(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
            return answer

        method: grpc.RpcMethodHandler = grpc.unary_unary_rpc_method_handler(handle)
        return method


class GrpcLoad:
    """Calls one address from one channel."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def run(self, count: int, concurrency: int) -> tuple[float, list[float]]:
        request, times_s, left = _observation(), [], iter(range(count))
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self._port}", _OPTIONS) as channel:
            call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(INFER)
            key = (("authorization", f"Bearer {KEY}"),)

            async def worker() -> None:
                for _ in left:
                    began_s = time.perf_counter()
                    await call(request, timeout=60.0, metadata=key)
                    times_s.append(time.perf_counter() - began_s)

            began_s = time.perf_counter()
            await asyncio.gather(*(worker() for _ in range(concurrency)))
            return time.perf_counter() - began_s, times_s
