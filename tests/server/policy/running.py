"""A policy server on ports of its own, in a thread of this process."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from logging.handlers import QueueHandler

import grpc
import httpx
import numpy as np

from phalanx.engine.engine import Engine
from phalanx.engine_config import DeviceConfig, EngineArgs, EngineConfig, RuntimeConfig
from phalanx.plugin import PolicyAdapter
from phalanx.schema.observation import Observation
from phalanx.schema.server_config import ServerConfig
from phalanx.server.policy.server import PolicyServer
from phalanx.server.policy.summary import ServedPolicy
from phalanx.testing.policy import FakePolicy, FakePolicyArgs
from phalanx.wire.robot_inference import (
    CHECK_HEALTH,
    INFER,
    InferenceAnswer,
    InferenceCall,
    decode_health_response,
    decode_response,
    encode_health_request,
    encode_request,
)
from tests.server.running import ServerThread

CONFIG = EngineConfig(DeviceConfig("cpu", "float32"), RuntimeConfig(num_threads=1))


class PolicyClient:
    """Calls over one channel."""

    def __init__(self, address: str, metadata: Mapping[str, str] | None = None) -> None:
        self.channel = grpc.insecure_channel(address)
        self._infer = self.channel.unary_unary(INFER)
        self._health = self.channel.unary_unary(CHECK_HEALTH)
        self.metadata = tuple((metadata or {}).items())

    def future(
        self, observation: Observation, *, model: str = "", request_id: str = "r1", timeout=None
    ):
        data = encode_request(InferenceCall(request_id, model, observation))
        return self._infer.future(data, timeout=timeout, metadata=self.metadata)

    def infer(self, observation: Observation, **options) -> InferenceAnswer:
        return decode_response(self.future(observation, **options).result())

    def raw(self, data: bytes) -> bytes:
        return self._infer(data, metadata=self.metadata)

    def refused(self, observation: Observation, **options) -> tuple[grpc.StatusCode, str]:
        error = self.future(observation, **options).exception()
        return error.code(), error.details()

    def healthy(self, model: str = "") -> bool:
        return decode_health_response(self._health(encode_health_request(model)))


class RunningPolicy(ServerThread):
    """Of a robot's policy, over gRPC and HTTP."""

    bound: Future[ServedPolicy]
    ready: Future[ServedPolicy]

    def __init__(
        self, factory: Callable[[], Engine], adapter: PolicyAdapter, config: ServerConfig
    ) -> None:
        super().__init__(factory, lambda load: PolicyServer(load, adapter, config))

    @property
    def address(self) -> str:
        return self.bound.result().grpc

    @property
    def url(self) -> str:
        url = self.bound.result().http
        assert url is not None
        return url

    @contextmanager
    def client(self, metadata: Mapping[str, str] | None = None) -> Iterator[PolicyClient]:
        client = PolicyClient(self.address, metadata)
        with client.channel:
            yield client

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60.0, verify=False)


def starting(
    args: FakePolicyArgs, plugin=FakePolicy, *, runtime: Mapping | None = None, **server
) -> RunningPolicy:
    """A server of the fake policy that may not be ready yet."""
    config = EngineConfig(
        CONFIG.device, RuntimeConfig(num_threads=1, **(runtime or {})), CONFIG.parallel
    )
    return RunningPolicy(
        lambda: Engine(EngineArgs(plugin.name, args, config)),
        plugin.policy(args, {}),
        ServerConfig(**{"port": 0, "model_name": "fake", **server}),
    )


@contextmanager
def serving(args: FakePolicyArgs | None = None, plugin=FakePolicy, **options):
    """Ready on entry, ended on exit, where what is held is let go."""
    args = args or FakePolicyArgs()
    server = starting(args, plugin, **options)
    try:
        server.ready.result()
        yield server
    finally:
        if args.gate is not None:
            args.gate.open()
        server.stop()
        server.stop()
        server.join()


@contextmanager
def logged(name: str, level: int) -> Iterator[queue.Queue[logging.LogRecord]]:
    """What the logger of this name says, from `level` on."""
    told: queue.Queue[logging.LogRecord] = queue.Queue()
    handler = QueueHandler(told)
    log = logging.getLogger(name)
    before = log.level
    log.setLevel(level)
    log.addHandler(handler)
    try:
        yield told
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


def seen(instruction: str = "", **fields) -> Observation:
    """An observation that the fake policies can use."""
    images = {name: np.full((8, 6, 3), index + 1, np.uint8) for index, name in enumerate("ab")}
    values = {
        "images": {"front": images["a"], "wrist": images["b"]},
        "state": np.arange(4, dtype=np.float32),
        "instructions": (instruction,),
    }
    return Observation(**{**values, **fields})
