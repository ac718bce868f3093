"""Many requests, many servers: what runs at the same time, and what may not."""

from __future__ import annotations

import os
import queue
from contextlib import ExitStack

import grpc
import numpy as np
import pytest

from phalanx import DeploymentConfig, Engine
from phalanx.engine_config import EngineArgs
from phalanx.schema.server_config import ServerConfig
from phalanx.testing.policy import FakePolicy, FakePolicyArgs, FakePolicyEntry, Gate, fake_actions
from tests.server.policy.running import CONFIG, RunningPolicy, seen, serving

Code = grpc.StatusCode


@pytest.mark.parametrize("plugin", [FakePolicy, FakePolicyEntry])
def test_r103_an_exclusive_server_takes_one_whole_request_at_a_time(plugin):
    arrived: queue.Queue[str] = queue.Queue()
    gate = Gate(arrived.put)
    args = FakePolicyArgs(gate=gate)
    with serving(args, plugin, exclusive=True) as server, server.client() as client:
        held = client.future(seen("hold"))
        assert arrived.get() == "hold"
        # It would be answered at once, or arrive in the adapter: nothing but its turn keeps it.
        for command in ("", "adapter-hold"):
            assert client.refused(seen(command), timeout=0.2)[0] is Code.DEADLINE_EXCEEDED
        assert arrived.empty()
        assert client.healthy()
        gate.open()
        held.result()
        client.infer(seen())


def test_r103_a_cancelled_request_keeps_its_turn_until_the_model_has_ended_it():
    arrived: queue.Queue[str] = queue.Queue()
    gate = Gate(arrived.put)
    args = FakePolicyArgs(gate=gate)
    with serving(args, FakePolicyEntry, exclusive=True) as server, server.client() as client:
        held = client.future(seen("hold"))
        assert arrived.get() == "hold"
        held.cancel()
        assert client.refused(seen("adapter-hold"), timeout=0.2)[0] is Code.DEADLINE_EXCEEDED
        assert arrived.empty()
        gate.open()
        client.infer(seen())


def test_r103_without_it_requests_overlap():
    arrived: queue.Queue[str] = queue.Queue()
    gate = Gate(arrived.put)
    with serving(FakePolicyArgs(gate=gate)) as server, server.client() as client:
        held = client.future(seen("hold"))
        assert arrived.get() == "hold"
        client.infer(seen())
        assert not held.done()
        gate.open()
        held.result()


@pytest.mark.long
def test_r104_replicas_behind_one_server_compute_at_the_same_time(tmp_path):
    """Both are inside of a step at once: each opens its FIFO there, and neither is let go before."""
    fifos = [tmp_path / name for name in "ab"]
    for fifo in fifos:
        os.mkfifo(fifo)
    args = FakePolicyArgs()
    deployment = DeploymentConfig.local(replica_count=2)
    server = RunningPolicy(
        lambda: Engine(EngineArgs(FakePolicyEntry.name, args, CONFIG), deployment=deployment),
        FakePolicyEntry.policy(args, {}),
        ServerConfig(port=0),
    )
    try:
        server.ready.result()
        with server.client() as client, ExitStack() as opened:
            futures = [client.future(seen(f"fifo {fifo}")) for fifo in fifos]
            for fifo in fifos:
                opened.enter_context(fifo.open("wb"))
            assert not any(future.done() for future in futures)
            opened.close()
            assert all(future.result() for future in futures)
    finally:
        server.stop()
        server.stop()
        server.join()


def test_r94_r96_four_servers_are_four_copies_with_an_engine_and_a_checkpoint_each():
    """Four requests are held at once, one in each server, and each answers with its own policy."""
    gates = []
    with ExitStack() as stack:
        servers = []
        for index in range(4):
            arrived: queue.Queue[str] = queue.Queue()
            gate = Gate(arrived.put)
            gates.append((gate, arrived))
            args = FakePolicyArgs(checkpoint_dir=f"copy-{index}", horizon=index + 1, gate=gate)
            servers.append((args, stack.enter_context(serving(args, model_name="pi05"))))
        clients = [stack.enter_context(server.client()) for _, server in servers]
        assert len({server.address for _, server in servers}) == 4
        assert len({id(server.engine) for _, server in servers}) == 4
        held = [client.future(seen("hold"), model="pi05") for client in clients]
        for _, arrived in gates:
            assert arrived.get() == "hold"
        assert not any(one.done() for one in held)
        for gate, _ in gates:
            gate.open()
        for (args, server), client in zip(servers, clients, strict=True):
            assert server.engine.args.plugin_args is args
            actions = client.infer(seen(), model="pi05").actions.values
            assert np.array_equal(actions, fake_actions(args, seen())[0])
