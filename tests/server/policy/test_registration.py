"""A policy server that registers itself at a gateway, which may come later, refuse, or forget it."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import pytest

from phalanx.server.policy.registration import SelfRegistration
from phalanx.testing.policy import FakePolicyArgs
from phalanx.wire.robot_inference import (
    HEARTBEAT,
    MODEL_REGISTRY,
    REGISTER,
    HeartbeatAnswer,
    Registration,
    RegistrationAnswer,
    decode_heartbeat,
    decode_registration,
    encode_heartbeat_answer,
    encode_registration_answer,
)
from tests.server.policy.running import logged, serving
from tests.server.test_roles_pd import free_port

INTERVAL_S = 0.02


class Registry:
    """A gateway's registry that says what comes to it; `known` are the servers of its leases."""

    def __init__(
        self,
        prefix: str,
        *,
        refuse: Callable[[], bool] = lambda: False,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self.events: queue.Queue[tuple[str, object]] = queue.Queue()
        self.known: set[str] = set()
        self._prefix = prefix
        self._refuse = refuse
        self._interval_s = interval_s

    def register(self, data: bytes, context: grpc.ServicerContext) -> bytes:
        registration = decode_registration(data)
        if self._refuse():
            self.events.put(("refused", registration))
            return encode_registration_answer(RegistrationAnswer(False, message="not yet"))
        server_id = f"{self._prefix}-{len(self.known)}"
        self.known.add(server_id)
        self.events.put(("registered", registration))
        return encode_registration_answer(RegistrationAnswer(True, server_id, self._interval_s))

    def heartbeat(self, data: bytes, context: grpc.ServicerContext) -> bytes:
        server_id = decode_heartbeat(data)
        self.events.put(("heartbeat", server_id))
        return encode_heartbeat_answer(HeartbeatAnswer(server_id in self.known))

    def next(self, kind: str) -> object:
        """The next event of this kind."""
        while True:
            found, value = self.events.get()
            if found == kind:
                return value


@contextmanager
def gateway(registry: Registry, port: int) -> Iterator[None]:
    server = grpc.server(ThreadPoolExecutor(2), options=[("grpc.so_reuseport", 0)])
    methods = {
        REGISTER.rpartition("/")[2]: grpc.unary_unary_rpc_method_handler(registry.register),
        HEARTBEAT.rpartition("/")[2]: grpc.unary_unary_rpc_method_handler(registry.heartbeat),
    }
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(MODEL_REGISTRY, methods),)
    )
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    try:
        yield
    finally:
        server.stop(None).wait()


@pytest.fixture
def port() -> int:
    return free_port()


def test_r93_a_server_registers_under_its_model_and_sends_heartbeats(port):
    registry = Registry("a")
    with gateway(registry, port), serving(gateway=f"127.0.0.1:{port}", model_name="pi05") as server:
        assert registry.next("registered") == Registration(server.address, "pi05")
        assert registry.next("heartbeat") == "a-0"
        assert registry.next("heartbeat") == "a-0"


def test_what_it_advertises_is_what_it_was_told_to(port):
    registry = Registry("a")
    options = {"gateway": f"127.0.0.1:{port}", "advertise": "robots.example:50063"}
    with gateway(registry, port), serving(**options):
        assert registry.next("registered") == Registration("robots.example:50063", "fake")


def test_a_server_that_is_forgotten_registers_again(port):
    registry = Registry("a")
    with gateway(registry, port), serving(gateway=f"127.0.0.1:{port}") as server:
        registry.next("heartbeat")
        registry.known.clear()
        assert registry.next("registered") == Registration(server.address, "fake")
        registry.next("heartbeat")


def test_a_gateway_that_is_started_anew_gets_to_know_the_server_again(port):
    """Long before the next heartbeat is due: the lost connection tells."""
    first, second = Registry("first", interval_s=3600.0), Registry("second")
    offer = Registration("127.0.0.1:1", "pi05")

    async def register() -> None:
        registering = asyncio.create_task(
            SelfRegistration(f"127.0.0.1:{port}", offer, retry_s=0.001).run()
        )
        with gateway(first, port):
            assert await asyncio.to_thread(first.next, "registered") == offer
        with gateway(second, port):
            # After a heartbeat in its old name, unless the first one's answer was lost on its way.
            assert await asyncio.to_thread(second.next, "registered") == offer
            assert await asyncio.to_thread(second.next, "heartbeat") == "second-0"
        registering.cancel()
        await asyncio.wait((registering,))

    asyncio.run(register())


def test_a_refusal_is_tried_again_and_said_once(port):
    admitted = threading.Event()
    registry = Registry("a", refuse=lambda: not admitted.is_set())
    offer = Registration("127.0.0.1:1", "pi05")

    async def register() -> None:
        registering = asyncio.create_task(
            SelfRegistration(f"127.0.0.1:{port}", offer, retry_s=0.001).run()
        )
        for _ in range(3):
            assert await asyncio.to_thread(registry.next, "refused") == offer
        admitted.set()
        assert await asyncio.to_thread(registry.next, "registered") == offer
        registering.cancel()
        await asyncio.wait((registering,))

    with logged("phalanx.server.policy.registration", logging.WARNING) as told:
        with gateway(registry, port):
            asyncio.run(register())
        warnings = [told.get_nowait().getMessage() for _ in range(told.qsize())]
    assert warnings == [f"cannot register at 127.0.0.1:{port}, trying on: it answered: not yet"]


def test_a_server_without_its_gateway_serves_and_ends(port):
    with serving(FakePolicyArgs(), gateway=f"127.0.0.1:{port}") as server, server.client() as one:
        assert one.healthy()
    assert server.ended.exception() is None
