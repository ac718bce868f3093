"""The machines of a replica prove to each other that they have its key, before anything else."""

from __future__ import annotations

import contextlib
import pickle
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import pytest

from phalanx import DeploymentConfig, Engine, EngineArgs, EngineUnavailableError, settings
from phalanx.clock import SystemClock
from phalanx.engine.deployments.spanning import NodeFollower
from phalanx.engine.workers.node_key import StrangerError, admit, introduce, node_key
from phalanx.engine.workers.node_links import Greeting, NodeLink, NodeListener
from phalanx.engine.workers.node_stream import framed
from phalanx.errors import ConfigurationError
from phalanx.server import WorkerSupervisorConfig
from phalanx.testing import CountingArgs
from tests.engine.local_plugins import LoggedCounting, cpu
from tests.engine.ports import free_base_port

HEAD = "127.0.0.2"
KEY = b"the key of this replica"
GREETING = Greeting(1, "1", "counting of 2")
Engine.register(LoggedCounting)


@contextmanager
def both(act: Callable[[socket.socket], object]) -> Iterator[tuple[socket.socket, Future[object]]]:
    """A connection, at whose other end `act` runs."""
    here, there = socket.socketpair()
    done: Future[object] = Future()

    def run() -> None:
        try:
            done.set_result(act(there))
        except Exception as error:
            done.set_exception(error)
        finally:
            there.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield here, done
    finally:
        here.close()
        thread.join()


def test_two_that_have_the_key_let_each_other_in():
    with both(lambda link: admit(link, KEY)) as (link, head):
        introduce(link, KEY, "the head")
        assert head.result() is None


@pytest.mark.parametrize("theirs", [b"", b"another key than this one"])
def test_another_key_is_an_error_in_words_on_both_sides(theirs):
    with both(lambda link: admit(link, KEY)) as (link, head):
        with pytest.raises(EngineUnavailableError, match="the head has another PHALANX_NODE_KEY"):
            introduce(link, theirs, "the head")
        with pytest.raises(StrangerError, match="it has another PHALANX_NODE_KEY"):
            head.result()


def test_a_head_that_lets_everybody_in_without_the_key_is_found_out():
    def pretend(link: socket.socket) -> None:
        link.sendall(b"phxnode1" + bytes(32))
        said = link.recv(64, socket.MSG_WAITALL)
        link.sendall(b"+" + said[32:])  # the follower's own proof is none of a head

    with both(pretend) as (link, _), pytest.raises(EngineUnavailableError, match="does not know"):
        introduce(link, KEY, "the head")


def test_what_is_no_head_is_told_apart():
    with both(lambda link: link.sendall(b"HTTP/1.1 400 Bad Request" + bytes(64))) as (link, _):
        with pytest.raises(EngineUnavailableError, match="no head of a replica"):
            introduce(link, KEY, "the head")


class Planted:
    """Tells whether somebody has unpickled it."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return (Path.touch, (self.file,))


def test_nothing_is_unpickled_of_a_head_that_has_not_the_key(tmp_path):
    planted = tmp_path / "unpickled"
    listener = socket.create_server((HEAD, 0))

    def serve() -> None:
        link = listener.accept()[0]
        with link, contextlib.suppress(OSError):
            welcome = framed(b"\x82\xa4port\x4d\xa7refusal\xa0")  # as a head says it
            link.sendall(b"phxnode1" + bytes(32) + welcome)
            link.sendall(framed(pickle.dumps(Planted(planted))))
            while link.recv(1 << 16):
                pass

    thread = threading.Thread(target=serve)
    thread.start()
    link = NodeLink(listener.getsockname(), KEY, GREETING, 10.0, SystemClock())
    with pytest.raises(EngineUnavailableError):
        link.meet()
        link.receive()
    thread.join()
    listener.close()
    assert not planted.exists()


def test_a_head_says_who_has_come_in_vain_and_goes_on_waiting(caplog):
    port = free_base_port()
    listener = NodeListener(HEAD, port, KEY)
    gathered: Future[object] = Future()

    def gather() -> None:
        try:
            gathered.set_result(listener.accept(GREETING, 2, 77, 60.0, SystemClock()))
        except EngineUnavailableError as error:
            gathered.set_exception(error)

    thread = threading.Thread(target=gather)
    thread.start()
    stranger = NodeLink((HEAD, port), b"not the key of it", GREETING, 10.0, SystemClock())
    with pytest.raises(EngineUnavailableError, match="another PHALANX_NODE_KEY"):
        stranger.meet()
    with socket.create_connection((HEAD, port)) as following:
        assert following.recv(40)  # it is the next one's turn
        assert not gathered.done()
        following.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()
    with pytest.raises(
        EngineUnavailableError, match="came and was not let in: it has said nothing"
    ):
        gathered.result()
    assert "is not let into this replica: it has another PHALANX_NODE_KEY" in caplog.text


def machine(rank: int, address: str) -> DeploymentConfig:
    process = WorkerSupervisorConfig(node_rank=rank, num_nodes=2, master_addr=address)
    return DeploymentConfig.local(process_config=process)


@pytest.mark.parametrize("address", ["10.0.0.7", "0.0.0.0", "a-machine", "::"])
def test_machines_that_others_reach_do_not_start_without_a_key(address, monkeypatch):
    args = EngineArgs("logged_counting", CountingArgs(), cpu(2))
    monkeypatch.delenv("PHALANX_NODE_KEY", raising=False)
    for build in (
        lambda: Engine(args, deployment=machine(0, address)),
        lambda: NodeFollower(args, machine(1, address)),
    ):
        with pytest.raises(ConfigurationError, match=f"meet at {address}.*PHALANX_NODE_KEY"):
            build()


@pytest.mark.parametrize("address", ["127.0.0.2", "::1", "localhost"])
def test_machines_that_nobody_else_reaches_need_none(address, monkeypatch):
    process = machine(0, address).supervision
    monkeypatch.delenv("PHALANX_NODE_KEY", raising=False)
    assert node_key(process) == b""
    monkeypatch.setenv("PHALANX_NODE_KEY", KEY.decode())
    assert node_key(process) == KEY


def test_a_key_is_long_and_never_shown(monkeypatch):
    monkeypatch.setenv("PHALANX_NODE_KEY", "tooshort")
    with pytest.raises(ConfigurationError, match="has 8 characters") as refused:
        settings.node_key()
    assert "tooshort" not in str(refused.value)
    assert settings.given()["PHALANX_NODE_KEY"] == "(set)"
