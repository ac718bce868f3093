"""A policy server from the moment its ports are open to its end."""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
import threading

import grpc
import pytest

from phalanx import Engine
from phalanx.engine_config import EngineArgs
from phalanx.errors import CheckpointError, ConfigurationError
from phalanx.schema.server_config import ServerConfig
from phalanx.server.policy.main import GRPC_LOG, robots_may_leave
from phalanx.testing.policy import FakePolicy, FakePolicyArgs, Gate
from tests.server.policy.running import (
    CONFIG,
    PolicyClient,
    RunningPolicy,
    logged,
    seen,
    serving,
    starting,
)
from tests.server.policy.serve_process import phalanx_serve

Code = grpc.StatusCode
ARGS = FakePolicyArgs()


def test_the_port_answers_while_the_model_loads():
    loaded = threading.Event()

    def factory() -> Engine:
        loaded.wait()
        return Engine(EngineArgs(FakePolicy.name, ARGS, CONFIG))

    server = RunningPolicy(factory, FakePolicy.policy(ARGS, {}), ServerConfig(port=0))
    with server.client() as client:
        assert not client.healthy()
        error = client.future(seen()).exception()
        assert error.code() is Code.UNAVAILABLE
        assert "the server is starting" in error.details()
        assert ("phalanx-not-started", "1") in error.trailing_metadata()
        loaded.set()
        server.ready.result()
        assert client.healthy()
        client.infer(seen(), model="fake_policy")
    server.stop()
    server.join()
    assert server.engine.closed


def test_a_model_that_cannot_be_loaded_is_raised_when_the_port_is_closed():
    def factory() -> Engine:
        raise CheckpointError("model.safetensors is truncated")

    server = RunningPolicy(factory, FakePolicy.policy(ARGS, {}), ServerConfig(port=0))
    server.join()
    with pytest.raises(CheckpointError, match="truncated"):
        server.ended.result()


@pytest.mark.parametrize("key", ["port", "http_port"])
def test_a_port_in_use_is_named(key):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = starting(ARGS, **{key: port})
        server.join()
    with pytest.raises(ConfigurationError, match=f"{key}={port}"):
        server.ended.result()


def test_the_model_is_warmed_up_before_it_is_ready():
    with serving() as server:
        assert server.engine.statistics().num_completed == 1


def test_a_stop_lets_what_runs_end_and_takes_nothing_new():
    arrived: queue.Queue[str] = queue.Queue()
    gate = Gate(arrived.put)
    with (
        serving(FakePolicyArgs(gate=gate), grace_seconds=60.0) as server,
        server.client() as client,
    ):
        held = client.future(seen("hold"))
        assert arrived.get() == "hold"
        server.stop()
        while client.healthy():
            pass
        error = client.future(seen()).exception()
        assert error.code() is Code.UNAVAILABLE
        assert "the server is draining" in error.details()
        gate.open()
        assert held.result()
    assert server.ended.exception() is None
    assert server.engine.closed


def test_a_stop_ends_what_takes_longer_than_the_grace():
    arrived: queue.Queue[str] = queue.Queue()
    args = FakePolicyArgs(gate=Gate(arrived.put))
    with serving(args, grace_seconds=0.0) as server, server.client() as client:
        held = client.future(seen("hold"))
        assert arrived.get() == "hold"
        server.stop()
        error = held.exception()
        assert error.code() is Code.CANCELLED
        assert "the server ended the request" in error.details()
        assert arrived.get() == "cancelled hold"
    assert server.ended.exception() is None


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)]
)
def test_r98_a_real_process_says_where_it_serves_and_drains_on_a_signal(
    installed, tmp_path, number
):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    config = tmp_path / "fake.yaml"
    config.write_text(
        "plugin: fake_policy_entry\n"
        "config:\n  device: {target: cpu, params_dtype: float32}\n"
        "deployment: {mode: auto}\n"
        "server: {model_name: pi05, port: 0, http_port: 0, grace_seconds: 60}\n"
        "adapter:\n  args: {image_names: [front, wrist]}\n"
    )
    with phalanx_serve(installed, str(config), CUDA_VISIBLE_DEVICES="") as server:
        assert server.line == (
            f"phalanx: serving pi05 (fake_policy) at grpc://{server.address}, HTTP and openpi at "
            f"{server.url}; cameras: front, wrist; state: 4; actions: 5 x 3\n"
        )
        client = PolicyClient(server.address)
        with client.channel:
            assert client.healthy("pi05")
            running = client.future(seen(f"fifo {fifo}"), model="pi05")
            with fifo.open("wb"):  # the model is computing now
                server.process.send_signal(number)
                while client.healthy("pi05"):
                    pass
            assert running.result()
        server.process.communicate()
        assert server.process.returncode == 0


def test_an_answer_that_nobody_waits_for_is_no_fault_in_the_log():
    with logged(GRPC_LOG, logging.ERROR) as told:
        log = logging.getLogger(GRPC_LOG)
        with robots_may_leave():
            log.error("ExecuteBatchError raised in core by servicer method [%s]", "/a/b")
            log.error("Unexpected error")
        log.error("ExecuteBatchError raised in core by servicer method [%s]", "/a/b")
        words = [told.get_nowait().getMessage() for _ in range(told.qsize())]
    assert [one.split()[0] for one in words] == ["Unexpected", "ExecuteBatchError"]
