"""Whoever reaches the thread that answers for holds cannot keep it from answering others."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import ExitStack, closing, contextmanager

import msgspec
import pytest

from phalanx.clock import SystemClock
from phalanx.errors import RequestFailedError
from phalanx.schema.handoff import Handle, Source
from phalanx.step.transfer import client, frames
from phalanx.step.transfer.base import Ending, Reason
from phalanx.step.transfer.channels import Tcp, channel_of
from phalanx.step.transfer.doorkeeper import ACCEPT_PAUSE_S, Doorkeeper
from phalanx.step.transfer.holds import Holds
from phalanx.step.transfer.sockets import (
    NUM_READERS,
    NUM_RELEASERS,
    SocketTransfer,
    create_transfer,
)
from phalanx.testing.clock import ManualClock
from tests.step.transfer.contents import READ, Bytes, Held


@pytest.fixture
def holder() -> Iterator[SocketTransfer]:
    with closing(create_transfer("tcp", "127.0.0.1")) as one:
        yield one


class Waiting(Held):
    """Tells when it is freed."""

    def __init__(self) -> None:
        super().__init__()
        self.freed = threading.Event()

    def free(self) -> None:
        super().free()
        self.freed.set()


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


@pytest.mark.parametrize(
    "sent",
    [
        b"\xff\xff\xff\xff",
        b"\x00\x01\x00\x00",
        framed(b"no"),
        framed(b"\x82\xa4type\xa5watch\xa1x" + b"\x91" * 10_000 + b"\xc0"),
        framed(b"\x82\xa4type\xa5watch\xa5token\xa2\xff\xff"),
        framed(msgspec.msgpack.encode(frames.Watch("t", "h"))) + b"more",
    ],
    ids=["long", "longer than a call", "short", "deep", "no text", "two"],
)
def test_bytes_that_are_no_call(holder: SocketTransfer, sent: bytes):
    source = holder.source
    for _ in range(2):
        with channel_of(source).connect(source) as connection:
            connection.sendall(sent)
            assert isinstance(frames.receive_answer(connection), frames.Refused)


def test_an_answer_that_is_nested_too_deeply():
    with pytest.raises(frames.FrameError, match="not an answer"):
        frames.decoded_answer(b"\x82\xa4type\xa7refused\xa1x" + b"\x91" * 100_000 + b"\xc0")


def test_what_goes_wrong_over_a_caller_costs_no_other(holder: SocketTransfer):
    class Broken(Held):
        def free(self) -> None:
            raise KeyError("free")

    with pytest.raises(RequestFailedError, match="does not answer"):
        client.release(holder.hold(Broken()))
    state = Waiting()
    client.release(holder.hold(state))
    state.freed.wait()


def test_a_reason_that_is_long_is_told_shortly(holder: SocketTransfer):
    state = Waiting()
    client.release(holder.hold(state), Ending(Reason.DROPPED, "\U0001f40c" * 20_000))
    state.freed.wait()


@contextmanager
def hung() -> Iterator[Handle]:
    """What is held by an engine that takes connections and never answers, until the end."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(16)
        yield Handle(Source("tcp", "127.0.0.1", listener.getsockname()[1], "t"), "h")


def test_reads_do_not_wait_behind_releases_that_nobody_answers(holder: SocketTransfer):
    with closing(create_transfer("tcp", "127.0.0.1")) as reader, hung() as dead:
        for _ in range(NUM_READERS + NUM_RELEASERS):
            reader.release(dead)
        future = reader.read(holder.hold(Held()), READ, Bytes(chunk_bytes=4, count=2))
        wait([future])
        assert future.exception() is None


def test_a_read_ends_however_steadily_a_holder_sends(holder: SocketTransfer):
    clock = ManualClock()

    class Slow(Bytes):
        def write(self, index: int, chunk: memoryview) -> None:
            super().write(index, chunk)
            clock.advance(client.READ_TIMEOUT_S)

    sink = Slow(chunk_bytes=4, count=2)
    with pytest.raises(RequestFailedError, match="it took longer than"):
        client.read(holder.hold(Held()), READ, sink, clock)
    assert not sink.finished


class Listener(socket.socket):
    """Cannot take connections while it has no descriptors."""

    tries = 0
    empty = False

    def accept(self):
        self.tries += 1
        if self.empty:
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def test_without_descriptors_the_door_rests():
    clock, holds = ManualClock(), Holds(SystemClock(), 60.0)
    listener = Listener()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    address = listener.getsockname()
    door = Doorkeeper(listener, "t", Tcp("127.0.0.1"), holds, clock)
    asked = frames.encoded(frames.Watch("t", "unknown"))
    with closing(door), ExitStack() as stack:
        known = [stack.enter_context(socket.create_connection(address)) for _ in range(9)]
        for connection in known:
            connection.sendall(b"\0")
        first = known.pop()
        first.sendall(asked[1:])
        assert isinstance(frames.receive_answer(first), frames.Ended)
        listener.empty = True
        before = listener.tries
        late = stack.enter_context(socket.create_connection(address))
        late.sendall(asked)
        # Every answer is a turn of the thread, and somebody knocks in all of them.
        for connection in known:
            connection.sendall(asked[1:])
            assert isinstance(frames.receive_answer(connection), frames.Ended)
        assert listener.tries <= before + 1
        listener.empty = False
        clock.advance(ACCEPT_PAUSE_S)
        door.wake()
        assert isinstance(frames.receive_answer(late), frames.Ended)
