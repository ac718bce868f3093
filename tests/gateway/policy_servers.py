"""Scripted policy servers and the gateway's gRPC side in front of them, all on one event loop and
real sockets.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

import grpc
import grpc.aio
import numpy as np
import uvloop

from phalanx.clock import SystemClock
from phalanx.gateway.grpc.channels import Channels
from phalanx.gateway.grpc.front import GrpcFront, GrpcLimits
from phalanx.gateway.grpc.model_inference import ModelInference
from phalanx.gateway.grpc.model_registry import ModelRegistry
from phalanx.gateway.grpc.robot_stream import RobotStream
from phalanx.gateway.http.keys import Keys
from phalanx.gateway.http.request_ids import RequestIds
from phalanx.gateway.inference import PolicyCaller
from phalanx.gateway.pool import Pool
from phalanx.gateway.workers import Workers
from phalanx.routing.endpoint import Endpoint
from phalanx.routing.load import Ticket
from phalanx.routing.pool_policy import PoolPolicy
from phalanx.routing.pool_registry import PoolRegistry
from phalanx.routing.publisher import Publisher
from phalanx.routing.registration import Probe
from phalanx.schema.observation import Actions, Observation
from phalanx.wire import robot_inference as wire

T = TypeVar("T")
HOST = "127.0.0.1"
Context = grpc.aio.ServicerContext
Behaviour = Callable[[bytes, Context], Awaitable[bytes]]


def run(work: Coroutine[None, None, T]) -> T:
    """On the loop that the gateway runs on."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


def actions(horizon: int = 3, action_dim: int = 2) -> np.ndarray:
    return np.arange(horizon * action_dim, dtype=np.float32).reshape(horizon, action_dim)


def answer_to(request: bytes, values: np.ndarray | None = None) -> bytes:
    """What a policy server answers, in the form that the observation has."""
    call = wire.decode_request(request)
    if values is None:
        values = actions()
        if call.observation.batched:
            values = np.stack([values] * call.observation.num_rows)
    return wire.encode_response(wire.InferenceAnswer(call.request_id, Actions(values), 1500))


def request(request_id: str = "r-1", model_name: str = "pi05", **fields: object) -> bytes:
    return wire.encode_request(
        wire.InferenceCall(request_id, model_name, Observation(**fields))  # type: ignore[arg-type]
    )


class FakePolicyServer:
    """Answers by `behave`; `requests` are those that arrived, as they came."""

    def __init__(self, behave: Behaviour | None = None, port: int = 0) -> None:
        self.behave = behave or _answer
        self.requests: list[bytes] = []
        self.cancelled = asyncio.Event()
        self.remaining_s: list[float | None] = []
        self.release = asyncio.Event()
        self._arrived = asyncio.Event()
        self._port = port
        self._server = grpc.aio.server(
            options=(("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", -1))
        )
        methods = {"Infer": grpc.unary_unary_rpc_method_handler(self._infer)}
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(wire.MODEL_INFERENCE, methods),)
        )

    async def start(self) -> Endpoint:
        self._port = self._server.add_insecure_port(f"{HOST}:{self._port}")
        await self._server.start()
        return self.endpoint

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint.parse(f"{HOST}:{self._port}")

    async def stop(self) -> None:
        """At once, as if it had been killed."""
        await self._server.stop(None)

    async def arrived(self, count: int = 1) -> None:
        while len(self.requests) < count:
            self._arrived.clear()
            await self._arrived.wait()

    async def hold(self, data: bytes, context: Context) -> bytes:
        """A behaviour: wait for `release`."""
        await self.release.wait()
        return answer_to(data)

    async def _infer(self, data: bytes, context: Context) -> bytes:
        self.requests.append(data)
        self.remaining_s.append(context.time_remaining())
        self._arrived.set()
        try:
            return await self.behave(data, context)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


async def _answer(data: bytes, context: Context) -> bytes:
    return answer_to(data)


def refusing(
    code: grpc.StatusCode, words: str, metadata: Sequence[tuple[str, str]] = ()
) -> Behaviour:
    """A behaviour: end each request with this status."""

    async def refuse(data: bytes, context: Context) -> bytes:
        await context.abort(code, words, tuple(metadata))
        raise AssertionError

    return refuse


@dataclass(frozen=True)
class Fleet:
    """The gateway's gRPC side. `codes` are what the requests at servers came to, in order."""

    pool: Pool
    caller: PolicyCaller
    address: str
    codes: list[str]
    left: asyncio.Event

    def add(self, endpoint: Endpoint, model: str = "pi05") -> str:
        """Register a server and find it healthy."""
        server_id = self.pool.registry.register_managed(model, endpoint).server_id
        self.pool.registry.observe(server_id, Probe.HEALTHY)
        return server_id

    @property
    def in_flight(self) -> int:
        return self.pool.registry.load.total

    async def all_left(self, count: int) -> None:
        """Wait until so many requests have left their servers; each has left once."""
        while len(self.codes) < count:
            self.left.clear()
            await self.left.wait()
        assert len(self.codes) == count
        assert self.in_flight == 0

    def client(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(
            self.address,
            options=(
                ("grpc.max_receive_message_length", -1),
                ("grpc.use_local_subchannel_pool", 1),
            ),
        )


@asynccontextmanager
async def fleet(
    *servers: FakePolicyServer,
    model: str = "pi05",
    keys: Keys | None = None,
    limits: GrpcLimits | None = None,
    robot_model: str | None = None,
    workers: Workers | None = None,
) -> AsyncIterator[Fleet]:
    """Those servers, started and ready, behind a gateway's gRPC port."""
    clock = SystemClock()
    registry = PoolRegistry(Publisher("test"), clock, PoolPolicy())
    pool = Pool(registry, clock)
    channels = Channels(lambda: frozenset(server.endpoint for server in pool.snapshot.servers))
    caller = PolicyCaller(pool, channels)
    codes: list[str] = []
    left = asyncio.Event()

    def ended(ticket: Ticket, duration_s: float) -> None:
        codes.append(ticket.code)
        # The count follows when all listeners were told.
        asyncio.get_running_loop().call_soon(left.set)

    registry.load.listen(ended)
    front = GrpcFront(HOST, 0, keys=keys, limits=limits)
    front.add(ModelInference(pool, caller).service())
    front.add(ModelRegistry(pool).service())
    workers = workers or Workers(2)
    front.add(RobotStream(caller, workers, robot_model, RequestIds()).service())
    async with AsyncExitStack() as stack:
        stack.callback(workers.close)
        port = await front.start()
        stack.push_async_callback(channels.close)
        stack.push_async_callback(front.close)
        built = Fleet(pool, caller, f"{HOST}:{port}", codes, left)
        for server in servers:
            stack.push_async_callback(server.stop)
            built.add(await server.start(), model)
        yield built


async def infer(
    channel: grpc.aio.Channel, data: bytes, timeout_s: float | None = None
) -> grpc.aio.UnaryUnaryCall:
    """The call, begun."""
    return channel.unary_unary(wire.INFER)(data, timeout=timeout_s)


async def failure(call: Awaitable[bytes]) -> grpc.aio.AioRpcError:
    """The error that ends `call`."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("the call succeeded")
