"""Robots that speak as LeRobot's client does, and the gateway's port for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import grpc
import grpc.aio
import numpy as np

from phalanx.clock import Clock, SystemClock
from phalanx.errors import NoServerError
from phalanx.gateway.grpc.front import GrpcFront
from phalanx.gateway.inference import PolicyCaller
from phalanx.gateway.lerobot import LeRobotService, LeRobotSettings, RobotView
from phalanx.gateway.workers import Workers
from phalanx.wire import lerobot as wire
from phalanx.wire import robot_inference
from tests.gateway.policy_servers import HOST, FakePolicyServer, Fleet, fleet
from tests.wire.lerobot.pickles import config, observation

IMAGE = np.arange(72, dtype=np.uint8).reshape(4, 6, 3)
SENSORS = {"j0.pos": 0.5, "j1.pos": 1.5, "front": IMAGE, "task": "pick"}
CHUNK_BYTES = 2 * 1024 * 1024


def messages(data: bytes) -> list[bytes]:
    """An upload as LeRobot's client cuts it."""
    parts = [data[start : start + CHUNK_BYTES] for start in range(0, len(data), CHUNK_BYTES)]
    states = [wire.TransferState.MIDDLE] * len(parts)
    states[0] = wire.TransferState.BEGIN
    states[-1] = wire.TransferState.END
    return [wire.encode_upload_part(state, part) for state, part in zip(states, parts, strict=True)]


class Robot:
    """One client on its own connection. `authority` is what it says that it connects to."""

    def __init__(
        self, address: str, session_id: str | None = None, *, authority: str | None = None
    ) -> None:
        options: list[tuple[str, int | str]] = [("grpc.use_local_subchannel_pool", 1)]
        if authority is not None:
            options.append(("grpc.default_authority", authority))
        self._channel = grpc.aio.insecure_channel(address, options=options)
        self._metadata = () if session_id is None else (("x-session-id", session_id),)

    async def __aenter__(self) -> Robot:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._channel.close()

    async def ready(self) -> None:
        call = self._channel.unary_unary(wire.READY)
        assert await call(b"", metadata=self._metadata) == b""

    async def instruct(self, **changed: object) -> None:
        call = self._channel.unary_unary(wire.SEND_POLICY_INSTRUCTIONS)
        message = wire.encode_data(config(**changed))
        assert await call(message, metadata=self._metadata) == b""

    async def begin(self, **changed: object) -> None:
        await self.ready()
        await self.instruct(**changed)

    async def send(self, sensors: dict | None = None, **changed: object) -> None:
        """An observation of now, at step 0."""
        fields = {"timestamp": time.time(), **changed}
        await self.send_raw(messages(observation(sensors or SENSORS, **fields)))

    async def send_raw(self, upload: list[bytes]) -> None:
        call = self._channel.stream_unary(wire.SEND_OBSERVATIONS)
        assert await call(iter(upload), metadata=self._metadata) == b""

    async def begin_upload(self) -> grpc.aio.StreamUnaryCall:
        """Send a first message of two, and wait for a second one that does not come."""
        call = self._channel.stream_unary(wire.SEND_OBSERVATIONS)(metadata=self._metadata)
        await call.write(wire.encode_upload_part(wire.TransferState.BEGIN, b"abc"))
        return call

    def asked(self) -> grpc.aio.UnaryUnaryCall:
        return self._channel.unary_unary(wire.GET_ACTIONS)(b"", metadata=self._metadata)

    async def get(self) -> list[wire.TimedAction]:
        """One `GetActions`; no actions where the answer is empty."""
        answer = await self.asked()
        return wire.decode_actions(wire.decode_data(answer)) if answer else []

    async def acted(self) -> list[wire.TimedAction]:
        """Ask, as LeRobot's client does, until there are actions."""
        while not (actions := await self.get()):
            pass
        return actions


class Watched:
    """Passes on to the gateway's caller; `unserved` is set when no server was ready."""

    def __init__(self, caller: PolicyCaller) -> None:
        self._caller = caller
        self.unserved = asyncio.Event()

    async def answer(
        self, call: robot_inference.InferenceCall, timeout_s: float | None = None
    ) -> robot_inference.InferenceAnswer:
        try:
            return await self._caller.answer(call, timeout_s)
        except NoServerError:
            self.unserved.set()
            raise


@dataclass
class Port:
    """The gateway's side: `at` is the address that robots connect to."""

    fleet: Fleet
    robots: LeRobotService
    unserved: asyncio.Event
    at: str
    extra: list[str] = field(default_factory=list)

    def robot(self, session_id: str | None = None) -> Robot:
        return Robot(self.at, session_id)

    def view(self) -> RobotView:
        (view,) = self.robots.robots()
        return view


FAST = LeRobotSettings(poll_s=0.05, setup_wait_s=0.0)
PATIENT = LeRobotSettings(poll_s=30.0, setup_wait_s=0.0)


@asynccontextmanager
async def port(
    *servers: FakePolicyServer,
    settings: LeRobotSettings = PATIENT,
    model: str = "pi05",
    num_ports: int = 1,
    clock: Clock | None = None,
) -> AsyncIterator[Port]:
    """Robots' ports in front of those servers."""
    async with fleet(*servers, model=model) as gateway, AsyncExitStack() as stack:
        workers = Workers(2)
        stack.callback(workers.close)
        watched = Watched(gateway.caller)
        robots = LeRobotService(watched, workers, clock or SystemClock(), settings)
        stack.push_async_callback(robots.close)
        addresses = []
        for index in range(num_ports):
            front = GrpcFront(HOST, 0)
            front.add(robots.service(f"port {index}"))
            addresses.append(f"{HOST}:{await front.start()}")
            stack.push_async_callback(front.close)
        yield Port(gateway, robots, watched.unserved, addresses[0], addresses[1:])


def seen(server: FakePolicyServer) -> list[robot_inference.InferenceCall]:
    """The observations that a server got, without those that only ask whether a robot fits."""
    calls = [robot_inference.decode_request(data) for data in server.requests]
    return [call for call in calls if call.timestamp_ns]


async def told(robot: Robot) -> grpc.aio.AioRpcError:
    """What the robot is told when it asks for actions, however long that takes."""
    while True:
        try:
            await robot.get()
        except grpc.aio.AioRpcError as error:
            return error


async def refused(call: object) -> grpc.aio.AioRpcError:
    """How that call of a robot failed."""
    try:
        await call  # type: ignore[misc]
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("the call succeeded")
