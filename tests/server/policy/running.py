"""A policy server on ports of its own, in a thread of this process."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from logging.handlers import QueueHandler

import grpc
import httpx
import numpy as np
import uvloop

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


class RunningPolicy:
    """`engine` is known once the server is ready."""

    def __init__(
        self, factory: Callable[[], Engine], adapter: PolicyAdapter, config: ServerConfig
    ) -> None:
        self.bound: Future[ServedPolicy] = Future()
        self.ready: Future[ServedPolicy] = Future()
        self.ended: Future[None] = Future()
        self._engine: Future[Engine] = Future()
        self._stop: Callable[[], object] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

        def load() -> Engine:
            engine = factory()
            self._engine.set_result(engine)
            return engine

        self._thread = threading.Thread(target=self._run, args=(load, adapter, config))
        self._thread.start()

    def _run(
        self, load: Callable[[], Engine], adapter: PolicyAdapter, config: ServerConfig
    ) -> None:
        try:
            uvloop.run(self._serve(load, adapter, config))
            self.ended.set_result(None)
        except BaseException as error:
            for future in (self.bound, self.ready):
                if not future.done():
                    future.set_exception(error)
            self.ended.set_exception(error)

    async def _serve(
        self, load: Callable[[], Engine], adapter: PolicyAdapter, config: ServerConfig
    ) -> None:
        self._loop = loop = asyncio.get_running_loop()
        server = PolicyServer(load, adapter, config)
        self._stop = lambda: loop.call_soon_threadsafe(server.stop)
        await server.run(on_bound=self.bound.set_result, on_ready=self.ready.set_result)

    @property
    def engine(self) -> Engine:
        return self._engine.result()

    @property
    def address(self) -> str:
        return self.bound.result().grpc

    @property
    def url(self) -> str:
        url = self.bound.result().http
        assert url is not None
        return url

    def in_its_loop(self, work: Callable[[], object]) -> None:
        """Let the server's event loop do nothing but `work`."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(work)

    def stop(self) -> None:
        """Ask for the end; does not wait for it."""
        if self.bound.exception() is None and not self.ended.done():
            assert self._stop is not None
            self._stop()

    def join(self) -> None:
        self._thread.join()

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
