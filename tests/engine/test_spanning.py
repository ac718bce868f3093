"""A replica whose ranks are on several machines: two of them here, at addresses of their own."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from phalanx import DeploymentConfig, Engine, EngineArgs, EngineUnavailableError
from phalanx.clock import SystemClock
from phalanx.engine.deployments.spanning import NodeFollower, greeting
from phalanx.engine.workers.node_links import (
    Applied,
    Ended,
    Greeting,
    NodeLink,
    NodeListener,
    NodeRelay,
    Submitted,
)
from phalanx.errors import ConfigurationError
from phalanx.schema.control import Continue, Flush, Pause, PauseMode
from phalanx.server import WorkerSupervisorConfig
from phalanx.testing import CountingArgs, CountRequest
from phalanx.testing.faulty import Faulty, FaultyArgs
from tests.engine.local_plugins import LoggedCounting, cpu
from tests.engine.ports import free_base_port

HEAD = "127.0.0.2"
for plugin in (Faulty, LoggedCounting):
    Engine.register(plugin)


def machine(rank: int, port: int, **process: object) -> DeploymentConfig:
    return DeploymentConfig.local(
        process_config=WorkerSupervisorConfig(
            node_rank=rank, num_nodes=2, master_addr=HEAD, base_port=port, **process
        )
    )


ARGS = EngineArgs("logged_counting", CountingArgs(max_batch_size=2), cpu(2))


@contextmanager
def following(port: int) -> Iterator[tuple[NodeFollower, Future[None]]]:
    """The second machine, and how it ends."""
    follower, ended = NodeFollower(ARGS, machine(1, port)), Future()

    def run() -> None:
        try:
            follower.run(lambda: None)
        except EngineUnavailableError as error:
            ended.set_exception(error)
        else:
            ended.set_result(None)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield follower, ended
    finally:
        follower.stop()
        thread.join()


def test_ranks_on_two_machines_form_the_same_steps(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    port = free_base_port()
    with following(port) as (_, ended):
        with Engine(ARGS, deployment=machine(0, port)) as engine:
            counts = [engine.submit(CountRequest(count=number)) for number in range(3, 12)]
            engine.control(Pause(PauseMode.RETRACT))
            engine.control(Continue())
            assert [len(each.result().numbers) for each in counts] == list(range(3, 12))
        assert ended.result() is None
    logs = [(tmp_path / f"counting-{rank}.log").read_text() for rank in range(2)]
    assert logs[0] == logs[1] and "Final" in logs[0]


@pytest.mark.long
def test_a_lost_rank_of_another_machine_fails_the_replica(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    port = free_base_port()
    with following(port) as (follower, ended), Engine(ARGS, deployment=machine(0, port)) as engine:
        assert len(engine.step(CountRequest(count=2)).numbers) == 2
        (pid,) = follower.pids
        os.kill(pid, signal.SIGKILL)
        assert "SIGKILL" in str(ended.exception())
        with pytest.raises(EngineUnavailableError):
            while True:
                engine.step(CountRequest(count=2))


def test_only_a_batching_plugin_spans_machines():
    args = EngineArgs("faulty", FaultyArgs(), cpu(2))
    for build in (NodeFollower, lambda args, deployment: Engine(args, deployment=deployment)):
        with pytest.raises(ConfigurationError, match="only a batching one can span machines"):
            build(args, machine(1, 29500) if build is NodeFollower else machine(0, 29500))


def test_ranks_are_cut_into_equal_parts():
    odd = EngineArgs("logged_counting", CountingArgs(), cpu(1))
    with pytest.raises(ConfigurationError, match="cannot be cut into num_nodes=2 equal parts"):
        NodeFollower(odd, machine(1, 29500))


KEY = b"of this replica alone"
SETTINGS = {"max_batch_size": "2"}
EXPECTED = Greeting(0, "1", "counting of 2", SETTINGS)


def met(
    address: tuple[str, int], greeting: Greeting = Greeting(1, "1", "counting of 2", SETTINGS)
) -> NodeLink:
    """A follower's connection, welcomed."""
    link = NodeLink(address, KEY, greeting, 10.0, SystemClock())
    assert link.meet() == 77
    return link


@contextmanager
def gathering(num_nodes: int = 2) -> Iterator[tuple[tuple[str, int], Future]]:
    """A head that waits for the others."""
    port = free_base_port()
    listener, gathered = NodeListener(HEAD, port, KEY), Future()

    def gather() -> None:
        try:
            gathered.set_result(listener.accept(EXPECTED, num_nodes, 77, 60.0, SystemClock()))
        except EngineUnavailableError as error:
            gathered.set_exception(error)

    thread = threading.Thread(target=gather)
    thread.start()
    try:
        yield (HEAD, port), gathered
    finally:
        listener.close()
        thread.join()


@pytest.mark.parametrize(
    ("greeting", "says"),
    [
        (Greeting(1, "2", "counting of 2", SETTINGS), "it has Phalanx 2"),
        (
            Greeting(1, "1", "other of 2", SETTINGS),
            "started for other of 2, and the head for counting of 2",
        ),
        (
            Greeting(2, "1", "counting of 2", SETTINGS),
            "its --node-rank 2 is another one's, or not below 2",
        ),
        (Greeting(0, "1", "counting of 2", SETTINGS), "its --node-rank 0"),
        (
            Greeting(1, "1", "counting of 2", {"max_batch_size": "3"}),
            "it was started with max_batch_size=3, and the head with max_batch_size=2",
        ),
    ],
)
def test_a_machine_that_does_not_fit_is_told_why_and_the_others_may_come(greeting, says):
    with gathering() as (address, gathered):
        with pytest.raises(EngineUnavailableError, match=says):
            met(address, greeting)
        with socket.create_connection(address) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + b"x" * 64)
            with contextlib.suppress(ConnectionResetError):
                while stranger.recv(64):
                    pass
        link = met(address)
        (theirs,) = gathered.result().values()
        theirs.close()
        link.close()


def test_followers_get_everything_in_its_order_and_then_the_end():
    with gathering() as (address, gathered):
        link = met(address)
        lost: list[int] = []
        relay = NodeRelay(gathered.result(), 10.0)
        relay.watch(lost.append)
        sent = [Submitted(1, "a", {"x": 1}), Applied(0, Flush()), Submitted(2, "b", b"y" * 99999)]
        for message in sent:
            relay.send(message)
        assert [link.receive() for _ in sent] == sent
        relay.close()
        assert link.receive() == Ended()
        assert link.receive() is None and not lost
        link.close()


def test_the_head_is_told_of_a_machine_that_goes_away():
    with gathering() as (address, gathered):
        link = met(address)
        lost: Future[int] = Future()
        relay = NodeRelay(gathered.result(), 10.0)
        relay.watch(lost.set_result)
        link.close()
        assert lost.result() == 1
        relay.close()


def test_a_head_that_closes_does_not_wait_for_a_machine_that_hangs():
    with gathering() as (address, gathered):
        link = met(address)
        relay = NodeRelay(gathered.result(), 0.1)
        for number in range(64):
            relay.send(Submitted(number, "a", b"x" * (1 << 20)))  # more than a connection holds
        relay.close()
        link.close()


def test_a_machine_stops_where_its_head_has_not_come():
    with following(free_base_port()) as (follower, ended):
        follower.stop()
        assert ended.result() is None


def test_a_machine_whose_head_goes_away_while_it_starts_is_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    port = free_base_port()
    listener = NodeListener(HEAD, port, b"")
    with following(port) as (follower, ended):
        process = machine(0, port).supervision
        expected = greeting(LoggedCounting, ARGS.plugin_args, cpu(2), process)
        (link,) = listener.accept(expected, 2, free_base_port(), 60.0, SystemClock()).values()
        listener.close()
        link.close()
        assert "the head of this replica is gone" in str(ended.exception())
        assert follower.pids == ()


def test_a_head_is_told_of_a_machine_that_goes_away_while_it_starts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    port = free_base_port()
    hello = greeting(LoggedCounting, ARGS.plugin_args, cpu(2), machine(1, port).supervision)

    def come_and_go() -> None:
        link = NodeLink((HEAD, port), b"", hello, 60.0, SystemClock())
        link.meet()
        link.close()

    thread = threading.Thread(target=come_and_go)
    thread.start()
    with pytest.raises(EngineUnavailableError, match="machine 1 of the 2 of this replica is gone"):
        Engine(ARGS, deployment=machine(0, port)).close()
    thread.join()


def test_machines_agree_on_numbers_and_may_have_paths_of_their_own():
    @dataclass(frozen=True)
    class Args(CountingArgs):
        path: str = "/here"

    process = machine(1, 1).supervision
    said = greeting(LoggedCounting, Args(max_batch_size=3), cpu(2), process)
    assert said.settings["max_batch_size"] == "3"
    assert said.settings["path"] == "(text)" and said.settings["params_dtype"] == "float32"


def test_a_head_that_closes_waits_for_nobody():
    with gathering() as (_, gathered):
        pass
    with pytest.raises(EngineUnavailableError, match="only 1 of the replica's 2 machines"):
        gathered.result()
